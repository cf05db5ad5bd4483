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

typedef struct RelaySink RelaySink;

/*
 * A kind of sink.  No function except connect() may wait, and that one no
 * longer than the sink's "timeout".
 */
typedef struct RelaySinkType
{
	const char *name;
	const RelaySettingDef *settings;	/* NULL: none of its own */

	/* Check the settings, count their faults, and allocate "state". */
	void		(*configure) (RelaySink *sink, RelayConfig *config);

	/* Connect.  Returns false and writes the reason if that fails. */
	bool		(*connect) (RelaySink *sink, char *why, size_t size);

	/* Return whether deliver() can be called now.  NULL: always. */
	bool		(*can_take) (RelaySink *sink);

	/*
	 * Deliver a message in flight.  The sink reports its outcome now or later
	 * with relay_sink_delivered(), relay_sink_refused(),
	 * relay_sink_deferred() or relay_sink_down().
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
	bool		verbose;		/* log each delivery */
	void	   *state;			/* of the type; sinks.c frees it */

	/* From the configuration, which outlives the sink. */
	RelaySection *section;
	const char *name;
	char	  **patterns;		/* of topics */
	bool		cloudevents;
	const char *source;			/* of CloudEvents */
	int			max_in_flight;
	int64_t		timeout;		/* of a delivery, in milliseconds */
	int64_t		max_size;		/* of a payload, in bytes */

	RelayMessageList ready;		/* waiting for the sink, in order */
	RelayMessageList in_flight; /* handed over, no outcome yet */
	bool		connected;
	int			window;			/* limit of in_flight while it recovers */
	int64_t		backoff;		/* after the last failure; 0: none */
	int64_t		held_until;		/* no deliveries before that; 0: not held */

	/* Since the start. */
	uint64_t	delivered;
	int64_t		delivery_ms;	/* total time of these deliveries */
	uint64_t	refused;
	uint64_t	deferred;
	uint64_t	failures;
	uint64_t	dead;
	RelaySink  *next;			/* in the order of the configuration */
};

extern void relay_sink_delivered(RelayMessage *message);
extern void relay_sink_refused(RelayMessage *message, int64_t retry_after,
							   const char *format,...) RELAY_FORMAT(3, 4);
extern void relay_sink_deferred(RelayMessage *message, int64_t retry_after,
								const char *format,...) RELAY_FORMAT(3, 4);
extern void relay_sink_down(RelaySink *sink, const char *format,...)
			RELAY_FORMAT(2, 3);
extern void relay_sink_back_off(RelaySink *sink, int64_t at_least,
								const char *why);
extern void relay_sink_pause(RelaySink *sink, const char *why);
extern void relay_sink_resume(RelaySink *sink);
extern void relay_sink_release_ready(RelaySink *sink);

#endif							/* IDEM_RELAY_SINK_H */
