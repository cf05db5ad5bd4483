/*-------------------------------------------------------------------------
 *
 * outbox_row.h
 *		The rows of idem_outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_ROW_H
#define IDEMPOTENCY_OUTBOX_ROW_H

#include "store/store.h"
#include "util/log_events.h"

/* The columns of idem_outbox, in order. */
enum
{
	OUTBOX_ID,
	OUTBOX_KEY_HASH,
	OUTBOX_CREATED_AT,
	OUTBOX_AVAILABLE_AT,
	OUTBOX_ACKED_AT,
	OUTBOX_ATTEMPT,
	OUTBOX_UNCOUNTED_ATTEMPTS,	/* that do not count */
	OUTBOX_AWAITING_ACK,		/* NULL: not taken; see outbox.c */
	OUTBOX_IN_DUE_INDEX,		/* see lanes.c */
	OUTBOX_MESSAGE_ID,
	OUTBOX_STATE,
	OUTBOX_TOPIC,
	OUTBOX_MESSAGE_KEY,
	OUTBOX_PAYLOAD,
	OUTBOX_HEADERS,
	OUTBOX_LAST_ERROR,
	OUTBOX_NUM_COLUMNS,
};

/* The columns of idem_outbox_lanes, from 1. */
#define LANES_LANE	1
#define LANES_ID	2

/* The default of "lease". */
#define IDEM_OUTBOX_LEASE_MS	(30 * 1000.0)

/* The columns of a message. */
typedef struct IdemOutboxRow
{
	Datum		values[OUTBOX_NUM_COLUMNS];
	bool		nulls[OUTBOX_NUM_COLUMNS];
} IdemOutboxRow;

extern int	idem_outbox_attempts(const Datum *message);
extern int64 idem_outbox_text_size(const IdemOutboxRow *message, int64 limit);
extern bool idem_outbox_find(IdemCursor *outbox, int64 id);
extern bool idem_outbox_write(IdemCursor *outbox, IdemOutboxRow *row);
extern void idem_outbox_changes(const IdemOutboxRow *row);
extern bool idem_outbox_in_state(IdemCursor *outbox, const char *state);
extern void idem_outbox_copy(IdemCursor *outbox, IdemOutboxRow *row);
extern void idem_outbox_set(IdemOutboxRow *row, int column, Datum value);
extern void idem_write_message_event(IdemEvent event, const Datum *message);

/*
 * Log an event of this row of idem_outbox, if such events are logged.
 */
static inline void
idem_log_message_event(IdemEvent event, const Datum *message)
{
	if (idem_event_is_logged(event))
		idem_write_message_event(event, message);
}

#endif							/* IDEMPOTENCY_OUTBOX_ROW_H */
