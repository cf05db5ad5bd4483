/*-------------------------------------------------------------------------
 *
 * lanes.h
 *		Lanes: the order of messages with the same key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LANES_H
#define IDEMPOTENCY_LANES_H

#include "outbox/due_low_water.h"
#include "outbox/outbox_row.h"

/* See idem_lane_move_signpost(). */
#define IDEM_HEAD_UNKNOWN	PG_INT64_MIN

extern void idem_lane_scan_begin(IdemCursor *outbox,
								 int64 lane, Snapshot snapshot);
extern void idem_lane_append(IdemCursor *outbox, IdemOutboxRow *message);
extern bool idem_lane_is_blocked(IdemCursor *outbox, int64 lane, int64 id);
extern void idem_lane_recheck(IdemCursor *outbox, int64 lane, int64 id);
extern void idem_lane_recheck_if_parked(IdemCursor *outbox, const IdemOutboxRow *message);
extern void idem_lane_promote_next(IdemCursor *outbox, int64 lane, int64 id,
								   IdemOutboxRow *signpost);
extern bool idem_lane_move_signpost(IdemCursor *outbox, IdemCursor *lanes,
									Snapshot snapshot, int64 *head_id,
									IdemBlockers *blockers);
extern bool idem_lane_remove_signpost(IdemCursor *outbox, IdemCursor *lanes);
extern int64 idem_lanes_repair(IdemCursor *outbox);
extern bool idem_outbox_set_ready(IdemCursor *outbox, bool ready,
								  TimestampTz available_at);

#endif							/* IDEMPOTENCY_LANES_H */
