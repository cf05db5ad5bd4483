/*-------------------------------------------------------------------------
 *
 * log_events.h
 *		idempotency.log_events: a line in the server log for each event.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LOG_EVENTS_H
#define IDEMPOTENCY_LOG_EVENTS_H

#include "settings.h"

extern void idem_write_key_event(IdemEvent event, const Datum *record);
extern void idem_write_in_progress_event(const Datum *key);
extern void idem_write_stale_event(const Datum *entity, int64 action_id,
								   int64 last_action_id);
extern void idem_write_message_event(IdemEvent event, const Datum *message);
extern void idem_write_cleaned_event(const char *kind, int64 deleted);

static inline bool
idem_event_is_logged(IdemEvent event)
{
	return unlikely((idem_log_events & (1 << event)) != 0);
}

/*
 * Something happened to the key of this row of idem_keys.
 */
static inline void
idem_log_key_event(IdemEvent event, const Datum *record)
{
	if (idem_event_is_logged(event))
		idem_write_key_event(event, record);
}

/*
 * A claim of this scope and key has found another at it.
 */
static inline void
idem_log_in_progress_event(const Datum *key)
{
	if (idem_event_is_logged(IDEM_EVENT_IN_PROGRESS))
		idem_write_in_progress_event(key);
}

/*
 * An action of this user on this entity came after a later one.
 */
static inline void
idem_log_stale_event(const Datum *entity, int64 action_id,
					 int64 last_action_id)
{
	if (idem_event_is_logged(IDEM_EVENT_STALE))
		idem_write_stale_event(entity, action_id, last_action_id);
}

/*
 * Something happened to the message of this row of idem_outbox.
 */
static inline void
idem_log_message_event(IdemEvent event, const Datum *message)
{
	if (idem_event_is_logged(event))
		idem_write_message_event(event, message);
}

/*
 * A batch of the cleanup has deleted so many rows of this kind.
 */
static inline void
idem_log_cleaned_event(const char *kind, int64 deleted)
{
	if (idem_event_is_logged(IDEM_EVENT_CLEANED))
		idem_write_cleaned_event(kind, deleted);
}

#endif							/* IDEMPOTENCY_LOG_EVENTS_H */
