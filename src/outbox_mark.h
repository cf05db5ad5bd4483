/*-------------------------------------------------------------------------
 *
 * outbox_mark.h
 *		From where on a take has to look for rows that are ready.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_MARK_H
#define IDEMPOTENCY_OUTBOX_MARK_H

#include "datatype/timestamp.h"

/*
 * How far there is nothing to be found; all zero at the beginning.
 */
typedef struct IdemMark
{
	uint64		hash;			/* of the topic */
	uint64		relation_changes;
	TimestampTz reached;
	int64		restart_at;		/* see idem_monotonic_time() */
} IdemMark;

/*
 * A scan that begins at a mark, and moves it.
 */
typedef struct IdemMarkedScan
{
	IdemMark   *mark;
	TimestampTz until;			/* no further than there */
	int64		begin;
	bool		restarted;		/* it begins with the first entry */
} IdemMarkedScan;

extern TimestampTz idem_mark_begin(IdemMarkedScan *scan, const Datum *topic,
								   TimestampTz now);
extern void idem_mark_reached(IdemMarkedScan *scan, TimestampTz available_at);

#endif							/* IDEMPOTENCY_OUTBOX_MARK_H */
