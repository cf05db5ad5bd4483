/*-------------------------------------------------------------------------
 *
 * worker.h
 *		The background workers that clean up.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_WORKER_H
#define IDEMPOTENCY_WORKER_H

#include "nodes/pg_list.h"

extern void idem_register_launcher(void);
extern bool idem_is_listed(const List *names, const char *database);

#endif							/* IDEMPOTENCY_WORKER_H */
