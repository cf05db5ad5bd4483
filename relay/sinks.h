/*-------------------------------------------------------------------------
 *
 * sinks.h
 *		Where messages go: what a sink is, and what it tells.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_SINKS_H
#define RELAY_SINKS_H

#include "config.h"
#include "message.h"
#include "relay.h"

typedef struct Sink Sink;

/*
 * A kind of sink.  Only connect() may take time, up to the sink's "timeout".
 */
typedef struct SinkType
{
	const char *name;
	const SettingDef *settings;

	/* Read the settings; tell all faults through config_fault(). */
	void		(*configure) (Sink *sink, Config *config);

	/*
	 * Reach the other side.  False: not now, and why.  It has been called
	 * before, and sink_down() since, where it is called again.
	 */
	bool		(*connect) (Sink *sink, char *why, size_t size);

	/*
	 * Whether it can take one more right now; NULL: always.
	 */
	bool		(*can_take) (Sink *sink);

	/*
	 * Deliver this message, and say what became of it, at once or later:
	 * sink_delivered(), sink_refused(), sink_put_off() or sink_down().
	 */
	void		(*deliver) (Sink *sink, Message *message);

	/* Called in each round, at least once a second, while it is up. */
	void		(*work) (Sink *sink, int64_t now);

	/* Let go of what connect() has got; all deliveries are forgotten. */
	void		(*disconnect) (Sink *sink);

	/* Let go of what configure() has got. */
	void		(*free) (Sink *sink);
} SinkType;

struct Sink
{
	const SinkType *type;
	Section    *section;
	const char *name;
	char	  **patterns;		/* of topics */
	bool		cloudevents;
	const char *source;
	int			in_flight;		/* at most */
	int64_t		timeout;		/* of a delivery */
	int64_t		max_size;		/* of a payload */
	void	   *state;			/* its own */

	MessageList ready;			/* waiting for it, in turn */
	MessageList flying;			/* it has them */
	bool		connected;
	int			window;			/* in flight now, as it recovers */
	int64_t		backoff;		/* of the last failure; 0: none */
	int64_t		held_until;		/* not to be tried before; 0: it is up */

	/* Since the start. */
	uint64_t	delivered;
	int64_t		delivery_ms;	/* that took, in all */
	uint64_t	refused;
	uint64_t	put_off;
	uint64_t	failures;
	uint64_t	dead;
	Sink	   *next;
};

extern const SinkType amqp_sink;
extern const SinkType kafka_sink;
extern const SinkType webhook_sink;
extern const SinkType command_sink;
extern const SinkType stdout_sink;

extern Sink *sinks_first;

extern void sinks_configure(Config *config);
extern void sinks_try(Config *config);
extern void sinks_describe(void (*describe) (const char *title,
											 const SettingDef *defs));
extern bool sinks_connect(void);
extern void sinks_work(int64_t now);
extern void sinks_free(void);
extern Sink *sinks_for(const char *topic);
extern bool sinks_held(void);
extern char *sinks_topics(void);

extern void sink_delivered(Message *message);
extern void sink_refused(Message *message, int64_t retry_after,
						 const char *format,...)
			RELAY_FORMAT(3, 4);
extern void sink_put_off(Message *message, int64_t retry_after,
						 const char *format,...)
			RELAY_FORMAT(3, 4);
extern void sink_down(Sink *sink, const char *format,...)
			RELAY_FORMAT(2, 3);
extern void sink_pause(Sink *sink, const char *why);
extern void sink_resume(Sink *sink);

#endif							/* RELAY_SINKS_H */
