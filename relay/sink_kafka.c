/*-------------------------------------------------------------------------
 *
 * sink_kafka.c
 *		Sink: Kafka, through librdkafka's idempotent producer.
 *
 * A message is delivered when all in-sync replicas have confirmed it.  Its
 * Kafka key is its message_key, so messages of one key are in one partition.
 * Its other properties are Kafka headers.
 *
 * librdkafka has its own threads, which wake the event loop through a
 * descriptor.  It retries by itself until "timeout".  The message is then
 * deferred if it was certainly not written, and failed otherwise.
 *
 * librdkafka forgets a topic only with its producer, and needs about 10 kB for
 * each.  After MAX_TOPICS, the sink takes nothing until nothing is in flight,
 * and then makes a new producer.
 *
 * The sink's "state" is a Kafka, which owns the producer.  The callers are
 * sinks.c, dispatch.c and sink.c, through the RelaySinkType.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <librdkafka/rdkafka.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "event.h"
#include "json.h"
#include "memory.h"
#include "sink_kafka.h"

#define MAX_TOPICS	400			/* of a producer */
#define SEEN_BITS	8192

typedef struct Kafka
{
	rd_kafka_t *producer;
	rd_kafka_queue_t *queue;
	int			fd;				/* readable when "queue" has events */
	bool		closing;		/* ignore delivery reports */
	int			ntopics;		/* that were written to, about */
	unsigned char seen[SEEN_BITS / 8];	/* by hash, to count them */
} Kafka;

static const RelaySettingDef settings[] = {
	{"brokers", RELAY_TEXT, NULL, "to begin with, as host:9092,other:9092"},
	{"kafka_topic", RELAY_TEXT, "", "to write to; empty: the message's topic"},
	{RELAY_LIBRDKAFKA_PREFIX "...", RELAY_TEXT, "",
	"any setting of librdkafka, as librdkafka.security.protocol"},
	{"in_flight", RELAY_NUMBER, "1000",
	"how many messages are unconfirmed at a time", 1, 10000},
	{"max_size", RELAY_BYTES, "900kB",
		"of a payload; brokers accept a megabyte by "
	"default", 1, INT64_C(1) << 30},
	{NULL}
};

/* Headers that the message's own cannot replace. */
static const char *const reserved[] = {
	"message_id", "message_key", "topic", "content-type", NULL
};

static rd_kafka_conf_t *make_conf(RelaySink *sink, RelayConfig *config);
static void set_conf(rd_kafka_conf_t *conf, const char *name,
					 const char *value, RelayConfig *config,
					 const char *where);
static void log_error(rd_kafka_t *producer, int code, const char *reason,
					  void *argument);
static void log_debug(const rd_kafka_t *producer, int level,
					  const char *facility, const char *line);
static void count_topic(Kafka *kafka, const char *topic);
static rd_kafka_headers_t *make_headers(const RelayMessage *message);
static void disconnect_sink(RelaySink *sink);
static void queue_ready(void *argument, int fd, int events);
static void reported(rd_kafka_t *producer, const rd_kafka_message_t *report,
					 void *argument);

/*
 * Implement RelaySinkType.configure.
 */
static void
configure_sink(RelaySink *sink, RelayConfig *config)
{
	rd_kafka_conf_t *conf = make_conf(sink, config);
	rd_kafka_t *producer;
	char		why[512];

	sink->state = relay_alloc(sizeof(Kafka));
	/* Only the producer checks that settings fit together; without brokers. */
	rd_kafka_conf_set(conf, "bootstrap.servers", "", NULL, 0);
	rd_kafka_conf_set_log_cb(conf, NULL);
	producer = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof(why));
	if (producer)
		rd_kafka_destroy(producer);
	else
	{
		relay_config_fault(config, sink->section->where, "%s", why);
		rd_kafka_conf_destroy(conf);
	}
}

/*
 * Return the settings of the producer.  If "config" is not NULL, count the
 * faults.
 */
static rd_kafka_conf_t *
make_conf(RelaySink *sink, RelayConfig *config)
{
	rd_kafka_conf_t *conf = rd_kafka_conf_new();
	const RelaySetting *setting;
	char		timeout[32];
	size_t		prefix = strlen(RELAY_LIBRDKAFKA_PREFIX);

	snprintf(timeout, sizeof(timeout), "%lld", (long long) sink->timeout);
	set_conf(conf, "bootstrap.servers",
			 relay_section_text(sink->section, "brokers"), config,
			 relay_section_where(sink->section, "brokers"));
	set_conf(conf, "client.id", "idem-relay", config, "");
	set_conf(conf, "linger.ms", "0", config, "");
	set_conf(conf, "log.queue", "true", config, "");
	set_conf(conf, "reconnect.backoff.max.ms", "2000", config, "");
	for (setting = sink->section->settings; setting; setting = setting->next)
	{
		if (strncmp(setting->name, RELAY_LIBRDKAFKA_PREFIX, prefix) == 0)
			set_conf(conf, setting->name + prefix, setting->value, config,
					 setting->where);
	}
	/* The configuration cannot change these. */
	set_conf(conf, "enable.idempotence", "true", config, "");
	set_conf(conf, "message.timeout.ms", timeout, config,
			 relay_section_where(sink->section, "timeout"));
	rd_kafka_conf_set_opaque(conf, sink);
	rd_kafka_conf_set_dr_msg_cb(conf, reported);
	rd_kafka_conf_set_error_cb(conf, log_error);
	rd_kafka_conf_set_log_cb(conf, log_debug);
	return conf;
}

/*
 * Set a setting of librdkafka.  If "config" is not NULL, count a fault if
 * librdkafka does not accept it.
 */
static void
set_conf(rd_kafka_conf_t *conf, const char *name, const char *value,
		 RelayConfig *config, const char *where)
{
	char		why[512];

	if (rd_kafka_conf_set(conf, name, value, why, sizeof(why)) !=
		RD_KAFKA_CONF_OK && config)
		relay_config_fault(config, where, "%s", why);
}

/*
 * Log an error that librdkafka recovers from.  work() detects fatal errors.
 */
static void
log_error(rd_kafka_t *producer, int code, const char *reason, void *argument)
{
	const RelaySink *sink = argument;

	relay_log(RELAY_WARNING, "sink \"%s\": %s", sink->name, reason);
}

/*
 * Log a line of librdkafka, if the relay is verbose.
 */
static void
log_debug(const rd_kafka_t *producer, int level, const char *facility,
		  const char *line)
{
	const RelaySink *sink = rd_kafka_opaque(producer);

	if (sink->verbose)
		relay_log(RELAY_DEBUG, "librdkafka: %s: %s", facility, line);
}

/*
 * Implement RelaySinkType.connect: wait until a broker has answered.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	Kafka	   *kafka = sink->state;
	rd_kafka_conf_t *conf = make_conf(sink, NULL);
	const struct rd_kafka_metadata *metadata;
	rd_kafka_resp_err_t error;

	memset(kafka, 0, sizeof(Kafka));
	kafka->producer = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, size);
	if (!kafka->producer)
	{
		rd_kafka_conf_destroy(conf);
		return false;
	}
	rd_kafka_set_log_queue(kafka->producer, NULL);
	error = rd_kafka_metadata(kafka->producer, 0, NULL, &metadata,
							  (int) sink->timeout);
	if (error)
	{
		snprintf(why, size, "%s: %s",
				 relay_section_text(sink->section, "brokers"),
				 rd_kafka_err2str(error));
		rd_kafka_destroy(kafka->producer);
		return false;
	}
	rd_kafka_metadata_destroy(metadata);
	kafka->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (kafka->fd < 0)
	{
		snprintf(why, size, "%s", strerror(errno));
		rd_kafka_destroy(kafka->producer);
		return false;
	}
	kafka->queue = rd_kafka_queue_get_main(kafka->producer);
	rd_kafka_queue_io_event_enable(kafka->queue, kafka->fd,
								   "\1\0\0\0\0\0\0\0", 8);
	return true;
}

/*
 * Implement RelaySinkType.attach.
 */
static void
attach_sink(RelaySink *sink)
{
	Kafka	   *kafka = sink->state;

	relay_loop_watch(sink->loop, kafka->fd, RELAY_LOOP_READ, queue_ready,
					 kafka);
}

/*
 * Implement RelaySinkType.can_take: return whether the producer can write to
 * another topic.
 */
static bool
can_take(RelaySink *sink)
{
	const Kafka *kafka = sink->state;

	return kafka->ntopics < MAX_TOPICS;
}

/*
 * Count a topic, unless it has the hash of one that was counted.
 */
static void
count_topic(Kafka *kafka, const char *topic)
{
	uint32_t	hash = 2166136261U;

	for (; *topic; topic++)
		hash = (hash ^ (unsigned char) *topic) * 16777619U;
	hash %= SEEN_BITS;
	if (!(kafka->seen[hash / 8] & 1 << hash % 8))
		kafka->ntopics++;
	kafka->seen[hash / 8] |= (unsigned char) (1 << hash % 8);
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	Kafka	   *kafka = sink->state;
	const char *topic = relay_section_text(sink->section, "kafka_topic");
	RelayText  *body;
	rd_kafka_headers_t *headers;
	rd_kafka_resp_err_t error;

	if (relay_event_refuse_header(message, reserved))
		return;
	body = relay_text_new();
	headers = make_headers(message);
	relay_event_body(message, body);
	if (!*topic)
		topic = message->topic;
	count_topic(kafka, topic);
	error = rd_kafka_producev(kafka->producer, RD_KAFKA_V_TOPIC(topic),
							  RD_KAFKA_V_KEY(message->key, message->key ?
											 strlen(message->key) : 0),
							  RD_KAFKA_V_VALUE(body->data, body->len),
							  RD_KAFKA_V_HEADERS(headers),
							  RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
							  RD_KAFKA_V_OPAQUE(message), RD_KAFKA_V_END);
	relay_text_free(body);
	if (!error)
		return;
	rd_kafka_headers_destroy(headers);
	if (error == RD_KAFKA_RESP_ERR__QUEUE_FULL)
		relay_sink_failed(message, RELAY_UNSENT, 0, "%s",
						  rd_kafka_err2str(error));
	else if (error == RD_KAFKA_RESP_ERR__FATAL)
		relay_sink_down(sink, "%s", rd_kafka_err2str(error));
	else
		relay_sink_refused(message, -1, "%s", rd_kafka_err2str(error));
}

/*
 * Return the message's headers, and its properties that have no other place.
 * The producer frees them if it accepts the message, the caller otherwise.
 */
static rd_kafka_headers_t *
make_headers(const RelayMessage *message)
{
	rd_kafka_headers_t *headers = rd_kafka_headers_new(8);
	const char *at = message->headers;
	RelayText  *name = relay_text_new();
	RelayText  *value = relay_text_new();

	rd_kafka_header_add(headers, "message_id", -1, message->message_id, -1);
	rd_kafka_header_add(headers, "topic", -1, message->topic, -1);
	rd_kafka_header_add(headers, "content-type", -1,
						relay_event_content_type(message), -1);
	while (at && relay_json_read_member(&at, name, value))
		rd_kafka_header_add(headers, name->data, (ssize_t) name->len,
							value->data, (ssize_t) value->len);
	relay_text_free(name);
	relay_text_free(value);
	return headers;
}

/*
 * Process librdkafka's events.  The event loop calls this.
 */
static void
queue_ready(void *argument, int fd, int events)
{
	const Kafka *kafka = argument;
	uint64_t	count;

	(void) !read(fd, &count, sizeof(count));
	rd_kafka_poll(kafka->producer, 0);
}

/*
 * Report the outcome of a message.  rd_kafka_poll() calls this.
 */
static void
reported(rd_kafka_t *producer, const rd_kafka_message_t *report,
		 void *argument)
{
	const RelaySink *sink = argument;
	const Kafka *kafka = sink->state;
	RelayMessage *message = report->_private;

	if (kafka->closing)
		return;
	if (!report->err)
		relay_sink_delivered(message);
	else if (report->err == RD_KAFKA_RESP_ERR__MSG_TIMED_OUT)
		relay_sink_failed(message, rd_kafka_message_status(report) ==
						  RD_KAFKA_MSG_STATUS_NOT_PERSISTED ? RELAY_DEFERRED :
						  RELAY_FAILED, 0, "%s",
						  rd_kafka_err2str(report->err));
	else
		relay_sink_refused(message, -1, "%s", rd_kafka_err2str(report->err));
}

/*
 * Implement RelaySinkType.work.
 */
static void
work(RelaySink *sink, int64_t now)
{
	const Kafka *kafka = sink->state;
	char		why[512];

	rd_kafka_poll(kafka->producer, 0);
	if (rd_kafka_fatal_error(kafka->producer, why, sizeof(why)))
		relay_sink_down(sink, "%s", why);
	else if (kafka->ntopics >= MAX_TOPICS && sink->in_flight.count == 0)
	{
		disconnect_sink(sink);
		sink->connected = false;
		malloc_trim(0);
		relay_loop_wake_at(sink->loop, now);
	}
}

/*
 * Implement RelaySinkType.disconnect.
 */
static void
disconnect_sink(RelaySink *sink)
{
	Kafka	   *kafka = sink->state;

	kafka->closing = true;
	relay_loop_forget(sink->loop, kafka->fd);
	rd_kafka_queue_io_event_enable(kafka->queue, -1, NULL, 0);
	rd_kafka_queue_destroy(kafka->queue);
	rd_kafka_purge(kafka->producer, RD_KAFKA_PURGE_F_QUEUE |
				   RD_KAFKA_PURGE_F_INFLIGHT);
	rd_kafka_poll(kafka->producer, 0);
	rd_kafka_destroy(kafka->producer);
	close(kafka->fd);
}

const RelaySinkType relay_sink_kafka = {
	"kafka", settings, configure_sink, connect_sink, attach_sink, can_take,
	deliver, work, disconnect_sink
};
