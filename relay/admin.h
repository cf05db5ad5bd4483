/*-------------------------------------------------------------------------
 *
 * admin.h
 *		Commands for an operator: dead, requeue, status.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_ADMIN_H
#define IDEM_RELAY_ADMIN_H

#include <stdbool.h>

extern bool relay_admin_is_command(const char *word);
extern int	relay_admin_run(int argc, char **argv);

#endif							/* IDEM_RELAY_ADMIN_H */
