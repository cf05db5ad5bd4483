/*-------------------------------------------------------------------------
 *
 * worker.h
 *		A background worker that cleans up in one database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_WORKER_H
#define IDEMPOTENCY_WORKER_H

#include "maintenance/cleanup.h"

/*
 * The state of a database from one visit to the next.
 */
typedef struct IdemDatabaseVisit
{
	Oid			database;
	bool		work_left;
	int64		continue_at;	/* time to continue left work; see
								 * idem_monotonic_time() */
	bool		failed[IDEM_NUM_CLEANUP_KINDS]; /* in this interval */
	IdemCleanupPosition positions[IDEM_NUM_CLEANUP_KINDS];
	int64		deleted[IDEM_NUM_CLEANUP_KINDS];	/* in this pass */
} IdemDatabaseVisit;

/*
 * The shared memory of the launcher and its worker.  It needs no lock: there
 * is one worker at a time, and the launcher writes before it starts and reads
 * after it has ended.
 */
typedef struct IdemWorkerState
{
	bool		connected;		/* the launcher can read it any time */
	IdemDatabaseVisit visit;	/* the current visit */
} IdemWorkerState;

extern IdemWorkerState *idem_worker_state;

extern void idem_begin_worker(void);
extern void idem_leave_if_told(int exit_code);

#endif							/* IDEMPOTENCY_WORKER_H */
