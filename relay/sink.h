/*-------------------------------------------------------------------------
 *
 * sink.h
 *		A sink, and the outcomes that it reports.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SINK_H
#define IDEM_RELAY_SINK_H

#include "config.h"
#include "loop.h"
#include "queue.h"
#include "records.h"

struct RelayServer;

typedef struct RelaySink RelaySink;

/* The kinds of failures, by how much they say about the message. */
typedef enum RelayFailure
{
	RELAY_UNSENT,				/* nothing was sent: the sink is down */
	RELAY_DEFERRED,				/* the other side asks to try again later */
	RELAY_FAILED				/* an error of the message or of the sink */
} RelayFailure;

/* Upper bounds of the latency histogram, in milliseconds. */
#define RELAY_LATENCIES	{1, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 3000, \
	10000, 30000, 60000, 300000, 3600000}
#define RELAY_NLATENCIES	16

/* Pauses of a message or a sink after failures, in milliseconds. */
#define RELAY_SHORTEST_BACKOFF	500
#define RELAY_LONGEST_BACKOFF	30000

/*
 * A kind of sink.  Only connect() is allowed to wait, for each step no longer
 * than the sink's "timeout".
 */
typedef struct RelaySinkType
{
	const char *name;
	const RelaySettingDef *settings;	/* NULL: none of its own */

	/* Check the settings, count their faults, and allocate "state". */
	void		(*configure) (RelaySink *sink, RelayConfig *config);

	/*
	 * Connect.  Returns false and writes the reason if that fails.  If
	 * attach() is not NULL, a thread calls this, which uses only the
	 * configuration and "state".
	 */
	bool		(*connect) (RelaySink *sink, char *why, size_t size);

	/* Let the loop watch the connection.  NULL: connect() does not wait. */
	void		(*attach) (RelaySink *sink);

	/* Return whether deliver() can be called now.  NULL: always. */
	bool		(*can_take) (RelaySink *sink);

	/*
	 * Deliver a message in flight.  The sink reports its outcome now or later
	 * with relay_sink_delivered(), relay_sink_refused(), relay_sink_failed(),
	 * relay_sink_down() or relay_sink_closed().
	 */
	void		(*deliver) (RelaySink *sink, RelayMessage *message);

	/* Called in every round, at least once per second, while connected. */
	void		(*work) (RelaySink *sink, int64_t now);

	/*
	 * Release what connect() and deliver() acquired.  The messages in flight
	 * are still listed; report no outcome for them.
	 */
	void		(*disconnect) (RelaySink *sink);
} RelaySinkType;

struct RelaySink
{
	const RelaySinkType *type;
	RelayLoop  *loop;
	RelayQueue *queue;
	struct RelayServer *server; /* of the outbox */
	bool		verbose;		/* log each delivery */
	void	   *state;			/* of the type; sinks.c frees it */

	/* From the configuration, which outlives the sink. */
	RelaySection *section;
	const char *name;
	char	  **patterns;		/* of topics */
	char	  **scopes;			/* of claims to complete; NULL: of none */
	bool		cloudevents;
	const char *source;			/* of CloudEvents */
	int			max_in_flight;
	int64_t		timeout;		/* of a delivery, in milliseconds */
	int64_t		max_size;		/* of a payload, in bytes */
	char	   *schedule;		/* of pauses, as text of interval[]; or NULL */
	int64_t		max_age;		/* of a message that fails; 0: no limit */
	int64_t		grace;			/* how long failures of a sink are free */
	int64_t		disable_after;	/* 0: never */
	bool		ends;			/* no copy comes back; see sink_outbox.c */

	int			held;			/* its messages in the queue */
	size_t		held_size;		/* in bytes */
	RelayMessageList ready;		/* waiting, never failed, in order */
	RelayMessageList retries;	/* waiting, failed before, by turns */
	RelayMessageList in_flight; /* handed over, no outcome yet */
	int			retrying;		/* in flight that failed before */
	size_t		retrying_size;	/* in bytes */
	bool		after_retry;	/* the last one handed over is one of them */
	double		retry_ms;		/* mean duration of these attempts */
	const RelayMessage *abandoned;	/* the one that it holds, or NULL */
	struct RelayConnecting *connecting; /* while a thread connects */
	bool		connected;
	int			window;			/* limit of in_flight while it recovers */
	int64_t		passed_at;		/* when the last delivered was handed over */
	int			suspects;		/* deliveries until the window grows again */
	int			lost;			/* connections since the last delivery */
	int64_t		alone_at;		/* when the last one was handed over alone */
	int64_t		alone_turn;		/* no failed one is alone before that */
	int64_t		backoff;		/* after the last failure; 0: none */
	int64_t		held_until;		/* no deliveries before that; 0: not held */
	bool		disabled;		/* held until the relay starts again */

	/* To tell a bad message from a sink that is down; see pauses.c. */
	int			failing;		/* messages failed since the last delivery */
	double		mean_run;		/* mean of "failing" at recent deliveries */
	int64_t		last_failed;	/* id of the last of them */
	int			probes;			/* after a pause: failures until the next */
	int64_t		delivered_at;	/* when the last delivery was confirmed */
	int64_t		failing_since;	/* the first failure after that; 0: none */
	int64_t		failed_at;		/* the last failure */
	RelayRecords records;

	/* Since the start. */
	uint64_t	delivered;
	int64_t		delivery_ms;	/* total time of these deliveries */
	uint64_t	latencies[RELAY_NLATENCIES + 1];	/* the last: longer */
	int64_t		latency_ms;		/* their total */
	uint64_t	refused;
	uint64_t	deferred;
	uint64_t	postponed;
	uint64_t	failures;
	uint64_t	dead;
	RelaySink  *next;			/* in the order of the configuration */
};

/* sink.c */
extern void relay_sink_delivered(RelayMessage *message);
extern void relay_sink_refused(RelayMessage *message, int64_t retry_after,
							   const char *format,...) RELAY_FORMAT(3, 4);
extern void relay_sink_failed(RelayMessage *message, RelayFailure failure,
							  int64_t retry_after, const char *format,...)
			RELAY_FORMAT(4, 5);
extern void relay_sink_isolate(RelayMessage *message);
extern void relay_sink_down(RelaySink *sink, const char *format,...)
			RELAY_FORMAT(2, 3);
extern void relay_sink_closed(RelaySink *sink, const char *format,...)
			RELAY_FORMAT(2, 3);
extern void relay_sink_bury(const RelayMessage *message);
extern void relay_sink_release_ready(RelaySink *sink);

/* pauses.c */
extern void relay_sink_recover(RelaySink *sink);
extern void relay_sink_connected(RelaySink *sink);
extern bool relay_sink_can_be_down(const RelaySink *sink);
extern void relay_sink_suspect(RelaySink *sink, const RelayRecord *record,
							   RelayFailure failure, bool ended,
							   const char *why);
extern void relay_sink_back_off(RelaySink *sink, const char *why);
extern void relay_sink_halve(RelaySink *sink, int count);
extern void relay_sink_disable(RelaySink *sink, const char *why);
extern void relay_sink_pause(RelaySink *sink, const char *why);
extern void relay_sink_resume(RelaySink *sink);

/* choice.c */
extern void relay_sink_recall(RelayMessage *message, bool began_lately);
extern RelayMessage *relay_sink_next(RelaySink *sink, int64_t now);
extern RelayMessage *relay_sink_moving(const RelaySink *sink, int64_t now,
									   int *count);
extern bool relay_sink_is_late(const RelayMessage *message, int64_t now);
extern void relay_sink_limit_abandoned(RelayMessage *message);
extern void relay_sink_postpone_retries(RelaySink *sink);
extern void relay_sink_end_attempt(const RelayMessage *message);

#endif							/* IDEM_RELAY_SINK_H */
