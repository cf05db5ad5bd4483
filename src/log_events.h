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

extern void idem_write_key_event(const char *event, const Datum *record);
extern void idem_write_message_event(const char *event, const Datum *message);
extern void idem_write_cleaned_event(const char *kind, int64 deleted);

/*
 * Something happened to the key of this row of idem_keys.
 */
static inline void
idem_log_key_event(const char *event, const Datum *record)
{
	if (unlikely(idem_log_events))
		idem_write_key_event(event, record);
}

/*
 * Something happened to the message of this row of idem_outbox.
 */
static inline void
idem_log_message_event(const char *event, const Datum *message)
{
	if (unlikely(idem_log_events))
		idem_write_message_event(event, message);
}

/*
 * A batch of the cleanup has deleted so many rows of this kind.
 */
static inline void
idem_log_cleaned_event(const char *kind, int64 deleted)
{
	if (unlikely(idem_log_events))
		idem_write_cleaned_event(kind, deleted);
}

#endif							/* IDEMPOTENCY_LOG_EVENTS_H */
