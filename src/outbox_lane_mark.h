/*-------------------------------------------------------------------------
 *
 * outbox_lane_mark.h
 *		From where on a lane has pending messages.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_LANE_MARK_H
#define IDEMPOTENCY_OUTBOX_LANE_MARK_H

#include "utils/snapshot.h"

extern void idem_lane_marks_reserve(void);
extern int64 idem_lane_mark(int64 lane);
extern void idem_lane_mark_move(int64 lane, int64 head, Snapshot snapshot,
								int64 buffers);
extern void idem_lane_mark_found(int64 lane, int64 id);
extern void idem_lane_marks_expire(void);
extern int64 idem_lane_free_from(int64 lane, int64 id);
extern void idem_lane_is_free(int64 lane, int64 id, int64 buffers);
extern int64 idem_lane_buffers(void);

#endif							/* IDEMPOTENCY_OUTBOX_LANE_MARK_H */
