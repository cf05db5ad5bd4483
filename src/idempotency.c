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

#include "launcher.h"
#include "settings.h"

PG_MODULE_MAGIC;

void		_PG_init(void);

/*
 * Called when the library is loaded, in a backend or in the postmaster.
 */
void
_PG_init(void)
{
	idem_define_settings();
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		idem_register_launcher();
}
