/*
 * access_hook.c
 *		A module that is asked when a function is about to be executed, as those
 *		that enforce rules of their own are, and says so.
 */
#include "postgres.h"

#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "fmgr.h"
#include "utils/regproc.h"

PG_MODULE_MAGIC;

void		_PG_init(void);

static object_access_hook_type prev_object_access_hook = NULL;

static void
watch(ObjectAccessType access, Oid classId, Oid objectId, int subId, void *arg)
{
	if (prev_object_access_hook)
		prev_object_access_hook(access, classId, objectId, subId, arg);
	if (access == OAT_FUNCTION_EXECUTE && classId == ProcedureRelationId)
		ereport(NOTICE,
				(errmsg("execution of %s", format_procedure(objectId))));
}

void
_PG_init(void)
{
	prev_object_access_hook = object_access_hook;
	object_access_hook = watch;
}
