/*-------------------------------------------------------------------------
 *
 * log_events.h
 *		idempotency.log_events: a line in the server log for each event.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LOG_EVENTS_H
#define IDEMPOTENCY_LOG_EVENTS_H

#include "lib/stringinfo.h"
#include "util/settings.h"

extern void idem_log_begin(StringInfo line, IdemEvent event);
extern void idem_log_number(StringInfo line, const char *name, int64 value);
extern void idem_log_text(StringInfo line, const char *name, Datum value);
extern void idem_log_end(StringInfo line);

/*
 * Must the caller write a line about this event?
 */
static inline bool
idem_event_is_logged(IdemEvent event)
{
	return unlikely((idem_log_events & (1 << event)) != 0);
}

#endif							/* IDEMPOTENCY_LOG_EVENTS_H */
