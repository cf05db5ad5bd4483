/*-------------------------------------------------------------------------
 *
 * outbox.h
 *		The rows of idem_outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_H
#define IDEMPOTENCY_OUTBOX_H

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

extern void idem_lane_scan_begin(IdemScan *scan, IdemTable *outbox,
								 int64 lane, Snapshot snapshot);
extern void idem_lane_append(IdemTable *outbox, IdemOutboxRow *message);
extern bool idem_lane_is_blocked(IdemTable *outbox, int64 lane, int64 id);
extern void idem_lane_look_again(IdemTable *outbox, int64 lane, int64 id);
extern void idem_lane_kept(IdemTable *outbox, const IdemOutboxRow *message);
extern void idem_lane_left(IdemTable *outbox, int64 lane, int64 id,
						   IdemOutboxRow *signpost);
extern void idem_lane_move_signpost(IdemTable *outbox, IdemTable *lanes,
									Snapshot snapshot);
extern bool idem_lane_give_up_signpost(IdemTable *outbox, IdemTable *lanes);
extern void idem_lanes_sweep(IdemTable *outbox, const Datum *topics,
							 int ntopics);
extern bool idem_outbox_set_ready(IdemTable *outbox, bool ready,
								  TimestampTz available_at);

#endif							/* IDEMPOTENCY_OUTBOX_H */
