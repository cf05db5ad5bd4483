/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *		Module entry point.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "util/settings.h"
#include "worker/launcher.h"

PG_MODULE_MAGIC;

void		_PG_init(void);

/*
 * Called when the library is loaded, in a backend or in the postmaster.
 */
void
_PG_init(void)
{
	idem_define_settings();
	idem_has_launcher = process_shared_preload_libraries_in_progress &&
		!IsBinaryUpgrade;
	if (idem_has_launcher)
		idem_register_launcher();
}
