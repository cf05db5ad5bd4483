/*-------------------------------------------------------------------------
 *
 * lane_low_water.h
 *		Low-water marks of lanes: the id before which no message is pending.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LANE_LOW_WATER_H
#define IDEMPOTENCY_LANE_LOW_WATER_H

#include "utils/snapshot.h"

extern uint64 idem_lane_hash(int64 lane);
extern void idem_lane_low_water_reserve(void);
extern int64 idem_lane_low_water(int64 lane);
extern void idem_lane_low_water_raise(int64 lane, int64 head, Snapshot snapshot,
									  int64 buffers);
extern void idem_lane_low_water_found(int64 lane, int64 id);
extern void idem_lane_low_water_expire(int64 lane);
extern int64 idem_lane_free_from(int64 lane, int64 id);
extern void idem_lane_is_free(int64 lane, int64 id, int64 buffers);
extern int64 idem_lane_buffers(void);

#endif							/* IDEMPOTENCY_LANE_LOW_WATER_H */
