/*-------------------------------------------------------------------------
 *
 * outbox_row.h
 *		The rows of idem_outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_ROW_H
#define IDEMPOTENCY_OUTBOX_ROW_H

#include "store.h"

/* The columns of idem_outbox, in order. */
enum
{
	OUTBOX_ID,
	OUTBOX_LANE,
	OUTBOX_CREATED_AT,
	OUTBOX_AVAILABLE_AT,
	OUTBOX_ACKED_AT,
	OUTBOX_ATTEMPT,
	OUTBOX_ATTEMPTS_BEFORE,		/* that do not count any more */
	OUTBOX_LEASED,				/* NULL: not taken, see outbox.c */
	OUTBOX_READY,				/* see outbox_lanes.c */
	OUTBOX_MESSAGE_ID,
	OUTBOX_STATE,
	OUTBOX_TOPIC,
	OUTBOX_MESSAGE_KEY,
	OUTBOX_PAYLOAD,
	OUTBOX_HEADERS,
	OUTBOX_LAST_ERROR,
	OUTBOX_NUM_COLUMNS,
};

/* A message's row, and a new version of it. */
typedef struct IdemOutboxRow
{
	Datum		values[OUTBOX_NUM_COLUMNS];
	bool		nulls[OUTBOX_NUM_COLUMNS];
} IdemOutboxRow;

extern int	idem_outbox_attempts(const Datum *message);
extern bool idem_outbox_find(IdemTable *outbox, int64 id);
extern bool idem_outbox_write(IdemTable *outbox, IdemOutboxRow *row);
extern void idem_outbox_changes(const IdemOutboxRow *row);
extern bool idem_outbox_in_state(IdemTable *outbox, const char *state);
extern void idem_outbox_copy(IdemTable *outbox, IdemOutboxRow *row);
extern void idem_outbox_set(IdemOutboxRow *row, int column, Datum value);

#endif							/* IDEMPOTENCY_OUTBOX_ROW_H */
