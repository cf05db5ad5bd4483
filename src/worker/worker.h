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
 * What is remembered of a database from one visit to the next.
 */
typedef struct IdemDatabaseVisit
{
	Oid			database;
	bool		work_left;
	int64		continue_at;	/* with the work that is left; see
								 * idem_monotonic_time() */
	bool		failed[IDEM_NUM_CLEANUP_KINDS]; /* in this interval */
	IdemCleanupPosition positions[IDEM_NUM_CLEANUP_KINDS];
	int64		deleted[IDEM_NUM_CLEANUP_KINDS];	/* in this pass */
} IdemDatabaseVisit;

/*
 * What the launcher and its worker have to tell each other, in shared memory.
 * It needs no lock: there is one worker at a time, and the launcher writes
 * before that starts and reads when it has ended.
 */
typedef struct IdemWorkerState
{
	bool		connected;		/* the launcher may see that any time later */
	IdemDatabaseVisit visit;	/* the one that is going on */
} IdemWorkerState;

extern IdemWorkerState *idem_worker_state;

extern void idem_begin_worker(void);
extern void idem_leave_if_told(int exit_code);

#endif							/* IDEMPOTENCY_WORKER_H */
