/*-------------------------------------------------------------------------
 *
 * sinks.c
 *		The sinks: which one a topic goes to, and what each is given when.
 *
 * A sink that is down is not to be tried for a while, twice as long after each
 * failure.  What waits for it is given back to the server, which does not
 * count as an attempt, and no more is taken for it.  When it is up again it
 * gets one message, two after that, and so on up to what it can take.
 *
 *-------------------------------------------------------------------------
 */
#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answers.h"
#include "loop.h"
#include "queue.h"
#include "sinks.h"
#include "text.h"

#define SHORTEST_BACKOFF	500
#define LONGEST_BACKOFF		30000

/* In the order of the configuration. */
Sink	   *sinks_first = NULL;

/* What all sinks have in common. */
static const SettingDef common_settings[] = {
	{"sink", SETTING_TEXT, NULL, 0, 0,
	"what it is: amqp, kafka, webhook, command or stdout"},
	{"topics", SETTING_TEXT, NULL, 0, 0,
	"topics that go there, with commas; * and ? stand for others"},
	{"in_flight", SETTING_NUMBER, "100", 1, 10000,
	"how many messages it is given at once, of different keys"},
	{"timeout", SETTING_TIME, "10s", 100, 3600000,
	"how long a delivery may take"},
	{"max_size", SETTING_BYTES, "16MB", 1, INT64_C(1) << 30,
	"of a payload; larger ones are refused"},
	{"format", SETTING_TEXT, "payload", 0, 0,
	"of the body: payload, or cloudevents"},
	{"source", SETTING_TEXT, "/idempotency", 0, 0,
	"of CloudEvents: a URI of the publisher"},
	{NULL, SETTING_TEXT, NULL, 0, 0, NULL}
};

static const SinkType *const types[] = {
	&amqp_sink, &kafka_sink, &webhook_sink, &command_sink, &stdout_sink
};

/* The topics that are taken; NULL: all. */
static char **topics = NULL;

static void configure_sink(Config *config, Section *section);
static void check_shadows(Config *config, const Sink *sink);
static void configure_topics(Config *config);
static bool connect_sink(Sink *sink, int64_t now);
static void hold(Sink *sink, int64_t at_least, const char *why);

/*
 * Make the sinks that the configuration describes.
 */
void
sinks_configure(Config *config)
{
	Section    *section;

	for (section = config->main->next; section; section = section->next)
		configure_sink(config, section);
	if (!config->main->next)
		config_fault(config, config->main->where, "there is no sink; add a "
					 "section like [out] with \"sink = stdout\" and "
					 "\"topics = *\"");
	else if (config->nfaults == 0)
		configure_topics(config);
}

/*
 * Tell the faults of a configuration, beside the one that is in use.
 */
void
sinks_try(Config *config)
{
	Sink	   *first = sinks_first;
	char	  **these = topics;

	sinks_first = NULL;
	topics = NULL;
	sinks_configure(config);
	sinks_free();
	sinks_first = first;
	topics = these;
}

/*
 * Tell what sinks can be told: all of them, and those of each kind.
 */
void
sinks_describe(void (*describe) (const char *title, const SettingDef *defs))
{
	size_t		i;

	describe("Of each sink:", common_settings);
	for (i = 0; i < sizeof(types) / sizeof(types[0]); i++)
	{
		char		title[64];

		snprintf(title, sizeof(title), "Of the sink \"%s\":", types[i]->name);
		if (types[i]->settings->name)
			describe(title, types[i]->settings);
	}
}

static void
configure_sink(Config *config, Section *section)
{
	const char *type = section_text(section, "sink");
	const Setting *setting = section_setting(section, "sink");
	Sink	   *sink = relay_alloc(sizeof(Sink));
	Sink	  **end = &sinks_first;
	int			nfaults = config->nfaults;
	size_t		i;

	section->defs[1] = common_settings;
	if (setting)
		type = setting->value;
	for (i = 0; i < sizeof(types) / sizeof(types[0]); i++)
	{
		if (strcmp(types[i]->name, type) == 0)
			sink->type = types[i];
	}
	if (!sink->type)
	{
		config_fault(config, section_where(section, "sink"),
					 "section [%s] needs \"sink = ...\", one of amqp, kafka, "
					 "webhook, command, stdout", section->name);
		free(sink);
		return;
	}
	section->defs[0] = sink->type->settings;	/* its defaults first */
	config_check(config, section);

	sink->section = section;
	sink->name = section->name;
	sink->patterns = config_list(section_text(section, "topics"));
	sink->cloudevents = strcmp(section_text(section, "format"),
							   "cloudevents") == 0;
	if (!sink->cloudevents &&
		strcmp(section_text(section, "format"), "payload") != 0)
		config_fault(config, section_where(section, "format"),
					 "\"format\" is to be payload or cloudevents");
	sink->source = section_text(section, "source");
	if (!sink->patterns[0] && section_setting(section, "topics"))
		config_fault(config, section_where(section, "topics"),
					 "\"topics\" is empty; expected names with commas, or *");
	check_shadows(config, sink);
	if (config->nfaults == nfaults)
	{
		sink->in_flight = (int) section_number(section, "in_flight");
		sink->timeout = section_number(section, "timeout");
		sink->max_size = section_number(section, "max_size");
		sink->window = sink->in_flight;
		sink->type->configure(sink, config);
	}
	while (*end)
		end = &(*end)->next;
	*end = sink;
}

/*
 * A topic that goes to a section before this one never comes here.
 */
static void
check_shadows(Config *config, const Sink *sink)
{
	int			i;

	for (i = 0; sink->patterns[i]; i++)
	{
		const Sink *other = sinks_for(sink->patterns[i]);

		if (other)
			config_fault(config, section_where(sink->section, "topics"),
						 "topic \"%s\" goes to section [%s] already; move "
						 "[%s] before that, or take it out here",
						 sink->patterns[i], other->name, sink->name);
	}
}

/*
 * Which topics are taken.  Each is to have a sink, and patterns alone do not
 * say which topics there are.
 */
static void
configure_topics(Config *config)
{
	const char *named = section_text(config->main, "topics");
	const char *pattern_at = NULL;
	size_t		n = 0;
	size_t		i;
	Sink	   *sink;

	topics = config_list(named);
	if (topics[0])
	{
		for (i = 0; topics[i]; i++)
		{
			if (!sinks_for(topics[i]))
				config_fault(config, section_where(config->main, "topics"),
							 "topic \"%s\" has no sink; name it in \"topics\" "
							 "of a section, or take it out here", topics[i]);
		}
		return;
	}
	for (sink = sinks_first; sink; sink = sink->next)
	{
		for (i = 0; sink->patterns[i]; i++)
		{
			if (strcmp(sink->patterns[i], "*") == 0)
			{
				config_free_list(topics);
				topics = NULL;
				return;
			}
			if (strpbrk(sink->patterns[i], "*?[\\"))
				pattern_at = section_where(sink->section, "topics");
			topics = relay_resize(topics, (n + 2) * sizeof(char *));
			topics[n++] = relay_copy(sink->patterns[i]);
			topics[n] = NULL;
		}
	}
	if (pattern_at)
		config_fault(config, pattern_at, "a pattern leaves topics without a "
					 "sink; name those to take in \"topics\" above all "
					 "sections, or add a sink for \"*\"");
}

/*
 * Connect all, as the relay starts.  Tells which cannot be reached.
 */
bool
sinks_connect(void)
{
	bool		all = true;
	Sink	   *sink;
	char		why[512];

	for (sink = sinks_first; sink; sink = sink->next)
	{
		sink->connected = sink->type->connect(sink, why, sizeof(why));
		if (!sink->connected)
		{
			relay_log(RELAY_ERROR, "%s: sink \"%s\" cannot be reached: %s",
					  section_where(sink->section, "url"), sink->name, why);
			all = false;
		}
	}
	return all;
}

/*
 * Hand out what is ready; connect what is to be tried again.
 */
void
sinks_work(int64_t now)
{
	Sink	   *sink;

	for (sink = sinks_first; sink; sink = sink->next)
	{
		if (sink->held_until > now ||
			(!sink->connected && !connect_sink(sink, now)))
		{
			queue_give_back_ready(sink);
			loop_wake_at(sink->held_until);
			if (sink->connected)
				sink->type->work(sink, now);
			continue;
		}
		sink->held_until = 0;
		sink->type->work(sink, now);
		while (sink->ready.first && sink->connected && !sink->held_until &&
			   sink->flying.count < sink->window)
		{
			Message    *message = sink->ready.first;

			/* Not past its lease: it waits for that to be extended. */
			if (!answers_may_start(message, now) ||
				(sink->type->can_take && !sink->type->can_take(sink)))
				break;
			message->handed_at = now;
			queue_fly(message);
			if ((int64_t) message->payload_length > sink->max_size)
				sink_refused(message, -1, "the payload of %zu bytes is larger "
							 "than \"max_size\" of sink \"%s\"",
							 message->payload_length, sink->name);
			else
				sink->type->deliver(sink, message);
		}
	}
}

static bool
connect_sink(Sink *sink, int64_t now)
{
	char		why[512];

	sink->connected = sink->type->connect(sink, why, sizeof(why));
	if (!sink->connected)
	{
		sink->failures++;
		hold(sink, 0, why);
	}
	else
		relay_log(RELAY_INFO, "sink \"%s\" is connected again", sink->name);
	return sink->connected;
}

/*
 * Do not try that sink for a while.
 */
static void
hold(Sink *sink, int64_t at_least, const char *why)
{
	int64_t		pause;

	sink->backoff = sink->backoff ? sink->backoff * 2 : SHORTEST_BACKOFF;
	if (sink->backoff > LONGEST_BACKOFF)
		sink->backoff = LONGEST_BACKOFF;
	pause = relay_jitter(sink->backoff);
	if (pause < at_least)
		pause = at_least;
	sink->held_until = relay_now() + pause;
	sink->window = 1;
	queue_give_back_ready(sink);
	relay_log(RELAY_WARNING, "sink \"%s\" is held up: %s; next try in %.1f s",
			  sink->name, why, (double) pause / 1000);
}

/*
 * Let go of everything.
 */
void
sinks_free(void)
{
	while (sinks_first)
	{
		Sink	   *sink = sinks_first;

		sinks_first = sink->next;
		if (sink->connected)
			sink->type->disconnect(sink);
		sink->type->free(sink);
		config_free_list(sink->patterns);
		free(sink);
	}
	config_free_list(topics);
	topics = NULL;
}

/*
 * The sink of a topic: the first one that has a pattern for it.  NULL: none.
 */
Sink *
sinks_for(const char *topic)
{
	Sink	   *sink;
	int			i;

	for (sink = sinks_first; sink; sink = sink->next)
	{
		for (i = 0; sink->patterns[i]; i++)
		{
			if (fnmatch(sink->patterns[i], topic, 0) == 0)
				return sink;
		}
	}
	return NULL;
}

/*
 * Whether a sink is held up, or finds its way back.
 */
bool
sinks_held(void)
{
	Sink	   *sink = sinks_first;

	while (sink && !sink->held_until)
		sink = sink->next;
	return sink != NULL;
}

/*
 * The topics to take now, as a text[]; "" for all, NULL for none.
 */
char *
sinks_topics(void)
{
	Text	   *array;
	char	   *text = NULL;
	int			i;

	if (!topics)
		return sinks_held() ? NULL : relay_copy("");
	array = text_new();
	for (i = 0; topics[i]; i++)
	{
		const Sink *sink = sinks_for(topics[i]);

		if (sink && !sink->held_until)
			text_add_element(array, topics[i]);
	}
	if (array->len)
	{
		text_add_char(array, '}');
		text = relay_copy(array->data);
	}
	text_free(array);
	return text;
}

/*
 * The other side has confirmed the message.
 */
void
sink_delivered(Message *message)
{
	Sink	   *sink = message->sink;

	sink->delivered++;
	sink->delivery_ms += relay_now() - message->handed_at;
	sink->backoff = 0;
	if (sink->window < sink->in_flight)
		sink->window = sink->window * 2 < sink->in_flight ?
			sink->window * 2 : sink->in_flight;
	relay_log(RELAY_DEBUG, "message %s of topic \"%s\" is delivered",
			  message->message_id, message->topic);
	queue_deliver(message);
}

/*
 * The other side does not take this message, or nobody knows whether it has
 * got it.  It is tried again after a while, "retry_after" in milliseconds or
 * -1, and is dead after so many attempts.
 */
void
sink_refused(Message *message, int64_t retry_after, const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	/* It may come from anywhere, and the end of it may be cut off. */
	text_mend(why, false);
	message->sink->refused++;
	relay_log(RELAY_WARNING, "message %s of topic \"%s\" failed at attempt "
			  "%d: %s", message->message_id, message->topic, message->attempt,
			  why);
	queue_refuse(message, retry_after, why);
}

/*
 * The other side takes no messages now, and has not got this one.
 */
void
sink_put_off(Message *message, int64_t retry_after, const char *format,...)
{
	Sink	   *sink = message->sink;
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	sink->put_off++;
	queue_give_back(message);
	/* Those that were on their way with it say the same. */
	if (!sink->held_until)
	{
		sink->failures++;
		hold(sink, retry_after, why);
	}
}

/*
 * The connection is lost, and it is not known what has become of what was in
 * flight.
 */
void
sink_down(Sink *sink, const char *format,...)
{
	char		why[1024];
	va_list		args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	sink->failures++;
	sink->type->disconnect(sink);
	sink->connected = false;
	hold(sink, 0, why);
	while (sink->flying.first)
		sink_refused(sink->flying.first, sink->held_until - relay_now(),
					 "no confirm: %s", why);
}

/*
 * The other side asks for a pause, and will say when it is over.  It keeps
 * what it has got, and may confirm that.
 */
void
sink_pause(Sink *sink, const char *why)
{
	sink->failures++;
	sink->held_until = INT64_MAX;
	queue_give_back_ready(sink);
	relay_log(RELAY_WARNING, "sink \"%s\" is held up: %s", sink->name, why);
}

/*
 * That pause is over.
 */
void
sink_resume(Sink *sink)
{
	sink->held_until = 0;
	loop_wake_at(relay_now());
	relay_log(RELAY_INFO, "sink \"%s\" goes on", sink->name);
}
