/*-------------------------------------------------------------------------
 *
 * metrics.c
 *		The relay's metrics, in the text format of Prometheus.
 *
 * This file owns no state.  It reads the counters of the other files.  http.c
 * calls it for each request.
 *
 *-------------------------------------------------------------------------
 */
#include "metrics.h"

/* Metrics of one sink; the order is that of sink_value(). */
static const char *const sink_metrics[][3] = {
	{"idem_relay_sink_delivered_total", "counter",
	"Messages that the sink has confirmed."},
	{"idem_relay_sink_delivery_seconds_total", "counter",
	"Time that took, from handing each over."},
	{"idem_relay_sink_refused_total", "counter",
	"Attempts that failed and count."},
	{"idem_relay_sink_deferred_total", "counter",
	"Attempts that failed and do not count."},
	{"idem_relay_sink_postponed_total", "counter",
	"Retries that got another pause, because there were many."},
	{"idem_relay_sink_failures_total", "counter",
	"How often the sink was paused."},
	{"idem_relay_sink_dead_total", "counter",
	"Messages dead after an attempt of this relay."},
	{"idem_relay_sink_in_flight", "gauge",
	"Messages handed over and not confirmed."},
	{"idem_relay_sink_ready", "gauge", "Messages waiting to be handed over."},
	{"idem_relay_sink_up", "gauge", "1 unless the sink is paused."},
	{"idem_relay_sink_disabled", "gauge",
	"1 if the sink is disabled until the relay starts again."},
};

/* Metrics of a section that completes requests; see claim_value(). */
static const char *const claim_metrics[][3] = {
	{"idem_relay_claims_resumed_total", "counter", "Claims taken over."},
	{"idem_relay_claims_completed_total", "counter", "Claims completed."},
	{"idem_relay_claims_postponed_total", "counter",
	"Claims whose request failed, to be tried again."},
	{"idem_relay_claims_lost_total", "counter",
	"Claims that could not be answered."},
};

static bool database_is_up(const RelayTaker *taker,
						   const RelayCompleter *completers);
static bool completer_is_up(const RelayCompleter *completer);
static uint64_t database_losses(const RelayTaker *taker,
								const RelayCompleter *completers);
static void append_head(RelayText *to, const char *name, const char *type,
						const char *help);
static void append_metric(RelayText *to, const char *name, const char *type,
						  const char *help, double value);
static void append_histogram(RelayText *to, const RelaySink *sink);
static void append_of_sink(RelayText *to, const char *name,
						   const RelaySink *sink, double value);
static double claim_value(const RelayCompleter *completer, size_t metric);
static double sink_value(const RelaySink *sink, size_t metric);
static void append_sink_name(RelayText *to, const RelaySink *sink);

/*
 * Append the metrics of a taker and of the parts that it refers to, and of
 * completers.
 */
void
relay_metrics_write(const RelayTaker *taker, const RelayCompleter *completers,
					RelayText *to)
{
	const RelayAnswers *answers = taker->answers;
	const RelayQueue *queue = taker->queue;
	const RelayCompleter *completer;
	const RelaySink *sink;
	size_t		i;

	append_metric(to, "idem_relay_taken_total", "counter",
				  "Messages taken from the outbox.", (double) taker->taken);
	append_metric(to, "idem_relay_acked_total", "counter",
				  "Messages acknowledged.", (double) answers->acked);
	append_metric(to, "idem_relay_nacked_total", "counter",
				  "Messages refused.", (double) answers->nacked);
	append_metric(to, "idem_relay_released_total", "counter",
				  "Messages released untried.", (double) answers->released);
	append_metric(to, "idem_relay_lost_total", "counter",
				  "Messages that another relay had taken by then.",
				  (double) answers->lost);
	append_metric(to, "idem_relay_held_messages", "gauge",
				  "Messages that the relay holds.", queue->count);
	append_metric(to, "idem_relay_held_bytes", "gauge",
				  "Memory that they take.", (double) queue->size);
	append_metric(to, "idem_relay_database_failures_total", "counter",
				  "Connections to the database lost, or not made.",
				  (double) database_losses(taker, completers));
	append_metric(to, "idem_relay_database_up", "gauge",
				  "1 while the server takes calls on all connections.",
				  database_is_up(taker, completers));
	for (i = 0; i < sizeof(sink_metrics) / sizeof(sink_metrics[0]); i++)
	{
		const char *const *metric = sink_metrics[i];

		append_head(to, metric[0], metric[1], metric[2]);
		for (sink = taker->routing->first; sink; sink = sink->next)
			append_of_sink(to, metric[0], sink, sink_value(sink, i));
	}
	for (i = 0; completers &&
		 i < sizeof(claim_metrics) / sizeof(claim_metrics[0]); i++)
	{
		const char *const *metric = claim_metrics[i];

		append_head(to, metric[0], metric[1], metric[2]);
		for (completer = completers; completer; completer = completer->next)
			append_of_sink(to, metric[0], completer->sink,
						   claim_value(completer, i));
	}
	append_head(to, "idem_relay_sink_latency_seconds", "histogram",
				"Time from publishing to the confirm.");
	for (sink = taker->routing->first; sink; sink = sink->next)
		append_histogram(to, sink);
}

/*
 * Append the state of a relay, a line for each thing that is wrong.  Returns
 * whether it can work: the server takes calls, and no sink is disabled.  A
 * paused sink is shown, but is tried again.
 */
bool
relay_metrics_health(const RelayTaker *taker,
					 const RelayCompleter *completers, RelayText *to)
{
	const RelaySink *sink;
	bool		healthy = database_is_up(taker, completers);

	if (!healthy)
		relay_text_add(to, "the database does not take calls\n");
	for (sink = taker->routing->first; sink; sink = sink->next)
	{
		if (sink->disabled)
			relay_text_addf(to, "sink \"%s\" is disabled\n", sink->name);
		else if (!sink->connected || sink->held_until)
			relay_text_addf(to, "sink \"%s\" is paused\n", sink->name);
		healthy &= !sink->disabled;
	}
	relay_text_add(to, healthy ? "ok\n" : "failing\n");
	return healthy;
}

/*
 * Return whether the server takes calls on all connections.
 */
static bool
database_is_up(const RelayTaker *taker, const RelayCompleter *completers)
{
	const RelayAnswers *answers = taker->answers;

	while (completers && completer_is_up(completers))
		completers = completers->next;
	return !completers && relay_answers_connected(answers) &&
		answers->database.backoff == 0 && taker->database.backoff == 0;
}

/*
 * Return whether the server takes calls on both connections of a completer.
 */
static bool
completer_is_up(const RelayCompleter *completer)
{
	return completer->answers.backoff == 0 && completer->resume.backoff == 0 &&
		(completer->answers.state == RELAY_DATABASE_IDLE ||
		 completer->answers.state == RELAY_DATABASE_BUSY);
}

/*
 * Return how many connections were lost, or not made.
 */
static uint64_t
database_losses(const RelayTaker *taker, const RelayCompleter *completers)
{
	uint64_t	losses = taker->database.losses +
		taker->answers->database.losses;

	for (; completers; completers = completers->next)
		losses += completers->resume.losses + completers->answers.losses;
	return losses;
}

/*
 * Append the latency histogram of a sink.
 */
static void
append_histogram(RelayText *to, const RelaySink *sink)
{
	static const int64_t bounds[] = RELAY_LATENCIES;
	RelayText  *labels = relay_text_new();
	uint64_t	count = 0;
	int			i;

	relay_text_add(labels, "sink=\"");
	append_sink_name(labels, sink);
	relay_text_addf(labels, "\",kind=\"%s\"", sink->type->name);
	for (i = 0; i <= RELAY_NLATENCIES; i++)
	{
		count += sink->latencies[i];
		relay_text_addf(to, "idem_relay_sink_latency_seconds_bucket{%s,le=\"",
						labels->data);
		if (i < RELAY_NLATENCIES)
			relay_text_addf(to, "%.15g\"} ", (double) bounds[i] / 1000);
		else
			relay_text_add(to, "+Inf\"} ");
		relay_text_addf(to, "%llu\n", (unsigned long long) count);
	}
	relay_text_addf(to, "idem_relay_sink_latency_seconds_sum{%s} %.17g\n"
					"idem_relay_sink_latency_seconds_count{%s} %llu\n",
					labels->data, (double) sink->latency_ms / 1000,
					labels->data, (unsigned long long) count);
	relay_text_free(labels);
}

/*
 * Append the lines that describe a metric.
 */
static void
append_head(RelayText *to, const char *name, const char *type,
			const char *help)
{
	relay_text_addf(to, "# HELP %s %s\n# TYPE %s %s\n", name, help, name,
					type);
}

/*
 * Append a metric that has a single value.
 */
static void
append_metric(RelayText *to, const char *name, const char *type,
			  const char *help, double value)
{
	append_head(to, name, type, help);
	relay_text_addf(to, "%s %.17g\n", name, value);
}

/*
 * Append the line of a metric for a sink.
 */
static void
append_of_sink(RelayText *to, const char *name, const RelaySink *sink,
			   double value)
{
	relay_text_addf(to, "%s{sink=\"", name);
	append_sink_name(to, sink);
	relay_text_addf(to, "\",kind=\"%s\"} %.17g\n", sink->type->name, value);
}

/*
 * Return the value that a metric of claim_metrics has for a completer.
 */
static double
claim_value(const RelayCompleter *completer, size_t metric)
{
	const uint64_t values[] = {
		completer->resumed, completer->completed, completer->postponed,
		completer->lost
	};

	return (double) values[metric];
}

/*
 * Return the value that a metric of sink_metrics has for a sink.
 */
static double
sink_value(const RelaySink *sink, size_t metric)
{
	const double values[] = {
		(double) sink->delivered, (double) sink->delivery_ms / 1000,
		(double) sink->refused, (double) sink->deferred,
		(double) sink->postponed,
		(double) sink->failures, (double) sink->dead, sink->in_flight.count,
		sink->ready.count + sink->retries.count,
		sink->connected && !sink->held_until, sink->disabled
	};

	return values[metric];
}

/*
 * Append the name of a sink, escaped for a label's value.
 */
static void
append_sink_name(RelayText *to, const RelaySink *sink)
{
	const char *c;

	for (c = sink->name; *c; c++)
	{
		if (*c == '"' || *c == '\\')
			relay_text_add_char(to, '\\');
		relay_text_add_char(to, *c);
	}
}
