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
 * A broker refuses a whole batch if one of its messages is invalid, or if the
 * batch is too large.  So the messages of a refused batch are sent again
 * through a second producer, whose batches have one message each.  Only its
 * refusals count.  From then on, messages that have failed before go there at
 * once.
 *
 * librdkafka forgets a topic only with its producer, and needs about 10 kB for
 * each.  After MAX_TOPICS, the sink makes a new producer.  The old one ends
 * when it has reported the outcome of all of its messages.
 *
 * The sink's "state" is a Kafka, which owns the producers.  The callers are
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
#define MAX_OLD		8			/* producers that wait for reports */
#define SEEN_BITS	8192

typedef struct Producer
{
	RelaySink  *sink;
	rd_kafka_t *handle;
	rd_kafka_queue_t *queue;
	int			fd;				/* readable when "queue" has events */
	bool		single;			/* its batches have one message each */
	bool		closing;		/* ignore delivery reports */
	int			unreported;		/* messages without a report */
	int			ntopics;		/* that were written to, about */
	unsigned char seen[SEEN_BITS / 8];	/* by hash, to count them */
	struct Producer *next;
} Producer;

typedef struct Kafka
{
	Producer   *first;			/* all of them */
	Producer   *batches;
	Producer   *singles;		/* batches of one message; NULL: not yet */
	int			nold;			/* neither of these two */
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
static void log_error(rd_kafka_t *handle, int code, const char *reason,
					  void *argument);
static void log_debug(const rd_kafka_t *handle, int level,
					  const char *facility, const char *line);
static Producer *make_producer(RelaySink *sink, bool single, char *why,
							   size_t size);
static void free_producer(Producer *producer);
static void add_producer(Kafka *kafka, Producer *producer);
static void end_producer(Kafka *kafka, Producer *producer);
static Producer *find_producer(RelaySink *sink, const RelayMessage *message,
							   char *why, size_t size);
static void count_topic(Producer *producer, const char *topic);
static rd_kafka_headers_t *make_headers(const RelayMessage *message);
static void queue_ready(void *argument, int fd, int events);
static void reported(rd_kafka_t *handle, const rd_kafka_message_t *report,
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
log_error(rd_kafka_t *handle, int code, const char *reason, void *argument)
{
	const Producer *producer = argument;

	relay_log(RELAY_WARNING, "sink \"%s\": %s", producer->sink->name, reason);
}

/*
 * Log a line of librdkafka, if the relay is verbose.
 */
static void
log_debug(const rd_kafka_t *handle, int level, const char *facility,
		  const char *line)
{
	const Producer *producer = rd_kafka_opaque(handle);

	if (producer->sink->verbose)
		relay_log(RELAY_DEBUG, "librdkafka: %s: %s", facility, line);
}

/*
 * Return a new producer, which the loop does not watch yet, or NULL after
 * writing the reason.  With "single", its batches have one message each.
 */
static Producer *
make_producer(RelaySink *sink, bool single, char *why, size_t size)
{
	rd_kafka_conf_t *conf = make_conf(sink, NULL);
	Producer   *producer = relay_alloc(sizeof(Producer));

	producer->sink = sink;
	producer->single = single;
	producer->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (producer->fd < 0)
		snprintf(why, size, "%s", strerror(errno));
	else
	{
		rd_kafka_conf_set_opaque(conf, producer);
		if (single)
			set_conf(conf, "batch.num.messages", "1", NULL, "");
		producer->handle = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, size);
	}
	if (!producer->handle)
	{
		rd_kafka_conf_destroy(conf);
		if (producer->fd >= 0)
			close(producer->fd);
		free(producer);
		return NULL;
	}
	rd_kafka_set_log_queue(producer->handle, NULL);
	producer->queue = rd_kafka_queue_get_main(producer->handle);
	rd_kafka_queue_io_event_enable(producer->queue, producer->fd,
								   "\1\0\0\0\0\0\0\0", 8);
	return producer;
}

/*
 * Release a producer that the loop does not watch.  Its messages get no
 * report.
 */
static void
free_producer(Producer *producer)
{
	producer->closing = true;
	rd_kafka_queue_io_event_enable(producer->queue, -1, NULL, 0);
	rd_kafka_queue_destroy(producer->queue);
	rd_kafka_purge(producer->handle, RD_KAFKA_PURGE_F_QUEUE |
				   RD_KAFKA_PURGE_F_INFLIGHT);
	rd_kafka_poll(producer->handle, 0);
	rd_kafka_destroy(producer->handle);
	close(producer->fd);
	free(producer);
}

/*
 * Let the loop watch a new producer.
 */
static void
add_producer(Kafka *kafka, Producer *producer)
{
	producer->next = kafka->first;
	kafka->first = producer;
	relay_loop_watch(producer->sink->loop, producer->fd, RELAY_LOOP_READ,
					 queue_ready, producer);
}

/*
 * Release a producer that was added.
 */
static void
end_producer(Kafka *kafka, Producer *producer)
{
	Producer  **at = &kafka->first;

	while (*at != producer)
		at = &(*at)->next;
	*at = producer->next;
	relay_loop_forget(producer->sink->loop, producer->fd);
	free_producer(producer);
}

/*
 * Implement RelaySinkType.connect: wait until a broker has answered.
 */
static bool
connect_sink(RelaySink *sink, char *why, size_t size)
{
	Kafka	   *kafka = sink->state;
	Producer   *producer = make_producer(sink, false, why, size);
	const struct rd_kafka_metadata *metadata;
	rd_kafka_resp_err_t error;

	memset(kafka, 0, sizeof(Kafka));
	if (!producer)
		return false;
	error = rd_kafka_metadata(producer->handle, 0, NULL, &metadata,
							  (int) sink->timeout);
	if (error)
	{
		snprintf(why, size, "%s: %s",
				 relay_section_text(sink->section, "brokers"),
				 rd_kafka_err2str(error));
		free_producer(producer);
		return false;
	}
	rd_kafka_metadata_destroy(metadata);
	kafka->batches = producer;
	return true;
}

/*
 * Implement RelaySinkType.attach.
 */
static void
attach_sink(RelaySink *sink)
{
	Kafka	   *kafka = sink->state;

	add_producer(kafka, kafka->batches);
}

/*
 * Implement RelaySinkType.can_take: return whether a message can be written to
 * any topic.
 */
static bool
can_take(RelaySink *sink)
{
	const Kafka *kafka = sink->state;

	return kafka->nold < MAX_OLD ||
		(kafka->batches->ntopics < MAX_TOPICS &&
		 (!kafka->singles || kafka->singles->ntopics < MAX_TOPICS));
}

/*
 * Return the producer for a message, or NULL after writing the reason.
 */
static Producer *
find_producer(RelaySink *sink, const RelayMessage *message, char *why,
			  size_t size)
{
	Kafka	   *kafka = sink->state;
	bool		single = message->apart ||
		(kafka->singles && message->failures > 0);
	Producer  **current = single ? &kafka->singles : &kafka->batches;
	Producer   *producer = *current;

	if (producer &&
		(producer->ntopics < MAX_TOPICS || kafka->nold >= MAX_OLD))
		return producer;
	producer = make_producer(sink, single, why, size);
	if (!producer)
		return NULL;
	add_producer(kafka, producer);
	if (*current)
		kafka->nold++;
	*current = producer;
	return producer;
}

/*
 * Count a topic, unless it has the hash of one that was counted.
 */
static void
count_topic(Producer *producer, const char *topic)
{
	uint32_t	hash = 2166136261U;

	for (; *topic; topic++)
		hash = (hash ^ (unsigned char) *topic) * 16777619U;
	hash %= SEEN_BITS;
	if (!(producer->seen[hash / 8] & 1 << hash % 8))
		producer->ntopics++;
	producer->seen[hash / 8] |= (unsigned char) (1 << hash % 8);
}

/*
 * Implement RelaySinkType.deliver.
 */
static void
deliver(RelaySink *sink, RelayMessage *message)
{
	Producer   *producer;
	const char *topic = relay_section_text(sink->section, "kafka_topic");
	RelayText  *body;
	rd_kafka_headers_t *headers;
	rd_kafka_resp_err_t error;
	char		why[512];

	if (relay_event_refuse_header(message, reserved))
		return;
	producer = find_producer(sink, message, why, sizeof(why));
	if (!producer)
	{
		relay_sink_failed(message, RELAY_UNSENT, 0, "%s", why);
		return;
	}
	body = relay_text_new();
	headers = make_headers(message);
	relay_event_body(message, body);
	if (!*topic)
		topic = message->topic;
	count_topic(producer, topic);
	error = rd_kafka_producev(producer->handle, RD_KAFKA_V_TOPIC(topic),
							  RD_KAFKA_V_KEY(message->key, message->key ?
											 strlen(message->key) : 0),
							  RD_KAFKA_V_VALUE(body->data, body->len),
							  RD_KAFKA_V_HEADERS(headers),
							  RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
							  RD_KAFKA_V_OPAQUE(message), RD_KAFKA_V_END);
	relay_text_free(body);
	if (!error)
	{
		producer->unreported++;
		return;
	}
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
	const Producer *producer = argument;
	uint64_t	count;

	(void) !read(fd, &count, sizeof(count));
	rd_kafka_poll(producer->handle, 0);
}

/*
 * Report the outcome of a message.  rd_kafka_poll() calls this.
 */
static void
reported(rd_kafka_t *handle, const rd_kafka_message_t *report,
		 void *argument)
{
	Producer   *producer = argument;
	RelayMessage *message = report->_private;

	producer->unreported--;
	if (producer->closing)
		return;
	if (!report->err)
		relay_sink_delivered(message);
	else if (report->err == RD_KAFKA_RESP_ERR__MSG_TIMED_OUT)
		relay_sink_failed(message, rd_kafka_message_status(report) ==
						  RD_KAFKA_MSG_STATUS_NOT_PERSISTED ? RELAY_DEFERRED :
						  RELAY_FAILED, 0, "%s",
						  rd_kafka_err2str(report->err));
	else if (report->err > 0 && !producer->single)
	{
		/* The broker has refused the whole batch. */
		message->apart = true;
		relay_queue_return(message);
	}
	else
		relay_sink_refused(message, -1, "%s", rd_kafka_err2str(report->err));
}

/*
 * Implement RelaySinkType.work.
 */
static void
work(RelaySink *sink, int64_t now)
{
	Kafka	   *kafka = sink->state;
	Producer   *producer;
	Producer   *next;
	char		why[512];

	for (producer = kafka->first; producer; producer = next)
	{
		next = producer->next;
		rd_kafka_poll(producer->handle, 0);
		if (rd_kafka_fatal_error(producer->handle, why, sizeof(why)))
		{
			relay_sink_down(sink, "%s", why);
			return;
		}
		if (producer->unreported == 0 && producer != kafka->batches &&
			producer != kafka->singles)
		{
			end_producer(kafka, producer);
			kafka->nold--;
			malloc_trim(0);
		}
	}
}

/*
 * Implement RelaySinkType.disconnect.
 */
static void
disconnect_sink(RelaySink *sink)
{
	Kafka	   *kafka = sink->state;

	while (kafka->first)
		end_producer(kafka, kafka->first);
}

const RelaySinkType relay_sink_kafka = {
	"kafka", settings, configure_sink, connect_sink, attach_sink, can_take,
	deliver, work, disconnect_sink
};
