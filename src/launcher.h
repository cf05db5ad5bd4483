/*-------------------------------------------------------------------------
 *
 * launcher.h
 *		The process that starts the workers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_LAUNCHER_H
#define IDEMPOTENCY_LAUNCHER_H

#include "nodes/pg_list.h"

/* Was the library loaded by the postmaster, so that there are workers? */
extern bool idem_has_launcher;

extern void idem_register_launcher(void);
extern bool idem_is_listed(const List *names, const char *database);

#endif							/* IDEMPOTENCY_LAUNCHER_H */
