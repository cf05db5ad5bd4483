/*-------------------------------------------------------------------------
 *
 * access.c
 *		Running GRANT and REVOKE, for access.sql.
 *
 * idem_grant() and idem_revoke() build such statements from the catalogs.
 * They run them through a function that SQL functions are bound to when they
 * are created.  So none of our names is looked up in a schema that might
 * belong to another role than the caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_authid_d.h"
#include "catalog/pg_type_d.h"
#include "commands/extension.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "tcop/tcopprot.h"
#include "tcop/utility.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

static bool lock_rows(const char *query, Oid id);

/*
 * idem_check_grantee(grantee) -> void
 *
 * Raises 22004 for NULL, and 42704 if there is no such role.  Locks the role
 * and the extension's schema against renaming, with the rights of a
 * superuser: if the role that installed the functions was dropped, they might
 * belong to an ordinary role.
 */
PG_FUNCTION_INFO_V1(idem_check_grantee);
Datum
idem_check_grantee(PG_FUNCTION_ARGS)
{
	const char *hint = "Pass the name of a role, as in 'web'::regrole.";
	Oid			user;
	int			context;
	bool		found;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", "grantee"),
				 errhint("%s", hint)));

	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(BOOTSTRAP_SUPERUSERID,
						   context | SECURITY_LOCAL_USERID_CHANGE);
	found = lock_rows("SELECT FROM pg_catalog.pg_authid AS r "
					  "WHERE r.oid OPERATOR(pg_catalog.=) $1 FOR KEY SHARE",
					  PG_GETARG_OID(0));
	if (!found)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role \"%s\" does not exist",
						DatumGetCString(DirectFunctionCall1(regroleout,
															PG_GETARG_DATUM(0)))),
				 errhint("%s", hint)));
	(void) lock_rows("SELECT FROM pg_catalog.pg_namespace AS n "
					 "WHERE n.oid OPERATOR(pg_catalog.=) $1 FOR KEY SHARE",
					 get_func_namespace(fcinfo->flinfo->fn_oid));
	SetUserIdAndSecContext(user, context);
	PG_RETURN_VOID();
}

/*
 * Run a query for the rows of an object.  Returns whether there is one.
 */
static bool
lock_rows(const char *query, Oid id)
{
	Oid			type = OIDOID;
	Datum		value = ObjectIdGetDatum(id);
	uint64		found;

	SPI_connect();
	SPI_execute_with_args(query, 1, &type, &value, NULL, false, 0);
	found = SPI_processed;
	SPI_finish();
	return found > 0;
}

/*
 * idem_execute_grant(statement) -> void
 *
 * Run a GRANT or REVOKE with the rights of the current user.  Raises 42601
 * for any other statement, 25006 if nothing can be written.  NULL does
 * nothing.
 *
 * In the install script, the server records the initial privileges of an
 * extension's objects (pg_init_privs), and pg_dump omits them.  Privileges
 * granted through this function are not recorded, but dumped.  They are for
 * roles that another installation would not grant anything to, or that might
 * be dropped.  Before 17, a dropped role stays in the record, and a dump with
 * it cannot be restored.
 */
PG_FUNCTION_INFO_V1(idem_execute_grant);
Datum
idem_execute_grant(PG_FUNCTION_ARGS)
{
	bool		in_script = creating_extension;
	char	   *statement;
	List	   *parsed;

	/* Also if there is nothing to do. */
	PreventCommandIfReadOnly("an idempotency function that writes");
	PreventCommandDuringRecovery("an idempotency function that writes");
	if (PG_ARGISNULL(0))
		PG_RETURN_VOID();

	statement = text_to_cstring(PG_GETARG_TEXT_PP(0));
	parsed = pg_parse_query(statement);
	if (list_length(parsed) != 1 ||
		!IsA(linitial_node(RawStmt, parsed)->stmt, GrantStmt))
		ereport(ERROR,
				(errcode(ERRCODE_SYNTAX_ERROR),
				 errmsg("statement is neither GRANT nor REVOKE of privileges")));

	PG_TRY();
	{
		creating_extension = false;
		SPI_connect();
		SPI_execute(statement, false, 0);
		SPI_finish();
	}
	PG_FINALLY();
	{
		creating_extension = in_script;
	}
	PG_END_TRY();
	PG_RETURN_VOID();
}
