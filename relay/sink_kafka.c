/*-------------------------------------------------------------------------
 *
 * sink_kafka.c
 *		Kafka, by librdkafka's idempotent producer.
 *
 * All replicas in sync have to confirm.  A message's key is its message_key,
 * so that those of one key are in one partition; its other properties are
 * headers.
 *
 * librdkafka has threads of its own, which tell this one through a descriptor.
 * It tries by itself until "timeout" is over; then it is known that the
 * message has not been written, or it is not known.
 *
 *-------------------------------------------------------------------------
 */
#include <librdkafka/rdkafka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "event.h"
#include "json.h"
#include "loop.h"
#include "sinks.h"
#include "text.h"

typedef struct Kafka
{
	rd_kafka_t *producer;
	rd_kafka_queue_t *queue;
	int			fd;				/* told when there is something in it */
	bool		closing;		/* deliveries are forgotten */
} Kafka;

static const SettingDef settings[] = {
	{"brokers", SETTING_TEXT, NULL, 0, 0,
	"to begin with, as host:9092,other:9092"},
	{"kafka_topic", SETTING_TEXT, "", 0, 0,
	"to write to; empty: the message's topic"},
	{LIBRDKAFKA_PREFIX "...", SETTING_TEXT, "", 0, 0,
	"any setting of librdkafka, as librdkafka.security.protocol"},
	{"in_flight", SETTING_NUMBER, "1000", 1, 10000,
	"how many messages are unconfirmed at a time"},
	{"max_size", SETTING_BYTES, "900kB", 1, INT64_C(1) << 30,
	"of a payload; brokers take a megabyte, unless told otherwise"},
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static rd_kafka_conf_t *make_conf(Sink *sink, Config *config);
static void set_conf(rd_kafka_conf_t *conf, const char *name,
					 const char *value, Config *config, const char *where);
static void queue_ready(void *argument, int fd, int events);
static void reported(rd_kafka_t *producer, const rd_kafka_message_t *report,
					 void *argument);
static void failed(rd_kafka_t *producer, int code, const char *reason,
				   void *argument);
static void logged(const rd_kafka_t *producer, int level, const char *facility,
				   const char *line);
static rd_kafka_headers_t *make_headers(const Message *message);

static void
kafka_configure(Sink *sink, Config *config)
{
	rd_kafka_conf_t *conf;

	sink->state = relay_alloc(sizeof(Kafka));
	conf = make_conf(sink, config);
	rd_kafka_conf_destroy(conf);
}

/*
 * Its settings; faults are told if there is a configuration.
 */
static rd_kafka_conf_t *
make_conf(Sink *sink, Config *config)
{
	rd_kafka_conf_t *conf = rd_kafka_conf_new();
	const Setting *setting;
	char		timeout[32];
	size_t		prefix = strlen(LIBRDKAFKA_PREFIX);

	snprintf(timeout, sizeof(timeout), "%lld", (long long) sink->timeout);
	set_conf(conf, "bootstrap.servers",
			 section_text(sink->section, "brokers"), config,
			 section_where(sink->section, "brokers"));
	set_conf(conf, "client.id", "idem-relay", config, "");
	set_conf(conf, "linger.ms", "0", config, "");
	set_conf(conf, "log.queue", "true", config, "");
	set_conf(conf, "reconnect.backoff.max.ms", "2000", config, "");
	for (setting = sink->section->settings; setting; setting = setting->next)
	{
		if (strncmp(setting->name, LIBRDKAFKA_PREFIX, prefix) == 0)
			set_conf(conf, setting->name + prefix, setting->value, config,
					 setting->where);
	}
	/* Not to be changed. */
	set_conf(conf, "enable.idempotence", "true", config, "");
	set_conf(conf, "message.timeout.ms", timeout, config,
			 section_where(sink->section, "timeout"));
	rd_kafka_conf_set_opaque(conf, sink);
	rd_kafka_conf_set_dr_msg_cb(conf, reported);
	rd_kafka_conf_set_error_cb(conf, failed);
	rd_kafka_conf_set_log_cb(conf, logged);
	return conf;
}

static void
set_conf(rd_kafka_conf_t *conf, const char *name, const char *value,
		 Config *config, const char *where)
{
	char		why[512];

	if (rd_kafka_conf_set(conf, name, value, why, sizeof(why)) !=
		RD_KAFKA_CONF_OK && config)
		config_fault(config, where, "%s", why);
}

/*
 * The first broker that answers is enough.
 */
static bool
kafka_connect(Sink *sink, char *why, size_t size)
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
		snprintf(why, size, "%s: %s", section_text(sink->section, "brokers"),
				 rd_kafka_err2str(error));
		kafka->closing = true;
		rd_kafka_destroy(kafka->producer);
		kafka->producer = NULL;
		return false;
	}
	rd_kafka_metadata_destroy(metadata);
	kafka->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (kafka->fd < 0)
		relay_exit(RELAY_SYSTEM, "could not make a descriptor for librdkafka");
	kafka->queue = rd_kafka_queue_get_main(kafka->producer);
	rd_kafka_queue_io_event_enable(kafka->queue, kafka->fd,
								   "\1\0\0\0\0\0\0\0", 8);
	loop_watch(kafka->fd, LOOP_READ, queue_ready, sink);
	return true;
}

static void
kafka_deliver(Sink *sink, Message *message)
{
	Kafka	   *kafka = sink->state;
	const char *topic = section_text(sink->section, "kafka_topic");
	Text	   *body = text_new();
	rd_kafka_headers_t *headers = make_headers(message);
	rd_kafka_resp_err_t error;

	event_body(message, body);
	if (!*topic)
		topic = message->topic;
	error = rd_kafka_producev(kafka->producer, RD_KAFKA_V_TOPIC(topic),
							  RD_KAFKA_V_KEY(message->key, message->key ?
											 strlen(message->key) : 0),
							  RD_KAFKA_V_VALUE(body->data, body->len),
							  RD_KAFKA_V_HEADERS(headers),
							  RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY),
							  RD_KAFKA_V_OPAQUE(message), RD_KAFKA_V_END);
	text_free(body);
	if (!error)
		return;
	rd_kafka_headers_destroy(headers);
	if (error == RD_KAFKA_RESP_ERR__QUEUE_FULL)
		sink_put_off(message, 0, "%s", rd_kafka_err2str(error));
	else if (error == RD_KAFKA_RESP_ERR__FATAL)
		sink_down(sink, "%s", rd_kafka_err2str(error));
	else
		sink_refused(message, -1, "%s", rd_kafka_err2str(error));
}

static void
queue_ready(void *argument, int fd, int events)
{
	Sink	   *sink = argument;
	Kafka	   *kafka = sink->state;
	uint64_t	count;

	(void) !read(kafka->fd, &count, sizeof(count));
	rd_kafka_poll(kafka->producer, 0);
}

/*
 * What has become of a message.
 */
static void
reported(rd_kafka_t *producer, const rd_kafka_message_t *report,
		 void *argument)
{
	const Sink *sink = argument;
	const Kafka *kafka = sink->state;
	Message    *message = report->_private;

	if (kafka->closing)
		return;
	if (!report->err)
		sink_delivered(message);
	else if (report->err == RD_KAFKA_RESP_ERR__MSG_TIMED_OUT &&
			 rd_kafka_message_status(report) ==
			 RD_KAFKA_MSG_STATUS_NOT_PERSISTED)
		sink_put_off(message, 0, "%s", rd_kafka_err2str(report->err));
	else
		sink_refused(message, -1, "%s", rd_kafka_err2str(report->err));
}

/*
 * librdkafka goes on by itself, unless the error is fatal; see kafka_work().
 */
static void
failed(rd_kafka_t *producer, int code, const char *reason, void *argument)
{
	const Sink *sink = argument;

	relay_log(RELAY_WARNING, "sink \"%s\": %s", sink->name, reason);
}

static void
logged(const rd_kafka_t *producer, int level, const char *facility,
	   const char *line)
{
	relay_log(RELAY_DEBUG, "librdkafka: %s: %s", facility, line);
}

/*
 * The message's headers, and what has no other place.
 */
static rd_kafka_headers_t *
make_headers(const Message *message)
{
	rd_kafka_headers_t *headers = rd_kafka_headers_new(8);
	const char *at = message->headers;

	rd_kafka_header_add(headers, "message_id", -1, message->message_id, -1);
	rd_kafka_header_add(headers, "topic", -1, message->topic, -1);
	rd_kafka_header_add(headers, "content-type", -1,
						event_content_type(message), -1);
	if (at)
	{
		Text	   *name = text_new();
		Text	   *value = text_new();

		while (json_member(&at, name, value))
			rd_kafka_header_add(headers, name->data, (ssize_t) name->len,
								value->data, (ssize_t) value->len);
		text_free(name);
		text_free(value);
	}
	return headers;
}

static void
kafka_work(Sink *sink, int64_t now)
{
	Kafka	   *kafka = sink->state;
	char		why[512];

	rd_kafka_poll(kafka->producer, 0);
	if (rd_kafka_fatal_error(kafka->producer, why, sizeof(why)))
		sink_down(sink, "%s", why);
}

static void
kafka_disconnect(Sink *sink)
{
	Kafka	   *kafka = sink->state;

	kafka->closing = true;
	loop_forget(kafka->fd);
	rd_kafka_queue_io_event_enable(kafka->queue, -1, NULL, 0);
	rd_kafka_queue_destroy(kafka->queue);
	rd_kafka_purge(kafka->producer, RD_KAFKA_PURGE_F_QUEUE |
				   RD_KAFKA_PURGE_F_INFLIGHT);
	rd_kafka_poll(kafka->producer, 0);
	rd_kafka_destroy(kafka->producer);
	close(kafka->fd);
	kafka->producer = NULL;
}

static void
kafka_free(Sink *sink)
{
	free(sink->state);
	sink->state = NULL;
}

const SinkType kafka_sink = {
	"kafka", settings, kafka_configure, kafka_connect, NULL, kafka_deliver,
	kafka_work, kafka_disconnect, kafka_free
};
