/*-------------------------------------------------------------------------
 *
 * access.c
 *		GRANT and REVOKE, for access.sql.
 *
 * idem_grant() and idem_revoke() put such statements together from what is in
 * the catalogs.  They run them through a function that SQL functions can be
 * bound to when they are created, so that nothing of ours is looked up by
 * name in a schema that may belong to another role than the one that calls.
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

#include "util/arguments.h"

/*
 * idem_check_grantee(grantee) -> void
 *
 * GRANT and REVOKE are formatted with names.  Keep the role and the extension's
 * schema from being renamed until the transaction ends: another role or schema
 * that gets the name would be granted the rights.  Raises 22004 for NULL, 42704
 * if there is no such role.
 *
 * The functions' owner need not be a superuser, and only superusers can lock
 * rows of these catalogs.
 */
PG_FUNCTION_INFO_V1(idem_check_grantee);
Datum
idem_check_grantee(PG_FUNCTION_ARGS)
{
	Datum		grantee = idem_required_arg(fcinfo, 0, "grantee");
	Oid			type = OIDOID;
	Oid			user;
	int			context;

	PreventCommandIfReadOnly("an idempotency function that writes");
	PreventCommandDuringRecovery("an idempotency function that writes");
	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(BOOTSTRAP_SUPERUSERID,
						   context | SECURITY_RESTRICTED_OPERATION);
	SPI_connect();
	SPI_execute_with_args("SELECT FROM pg_catalog.pg_authid AS r"
						  " WHERE r.oid OPERATOR(pg_catalog.=) $1"
						  " FOR KEY SHARE",
						  1, &type, &grantee, NULL, false, 0);
	if (SPI_processed == 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("role \"%s\" does not exist",
						DatumGetCString(DirectFunctionCall1(regroleout,
															grantee))),
				 errhint("Pass the name of a role, as in 'web'::regrole.")));
	SPI_execute("SELECT FROM pg_catalog.pg_namespace AS n"
				" WHERE n.oid OPERATOR(pg_catalog.=) (SELECT e.extnamespace"
				" FROM pg_catalog.pg_extension AS e"
				" WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency')"
				" FOR KEY SHARE",
				false, 0);
	SPI_finish();
	SetUserIdAndSecContext(user, context);
	PG_RETURN_VOID();
}

/*
 * idem_execute_grant(statement) -> void
 *
 * Run a GRANT or REVOKE with the rights of the current user.  Raises 42601 for
 * any other statement, 25006 where nothing can be written.  NULL stands for
 * none.
 *
 * Within the install script, the server notes what an extension's objects are
 * granted from the start (pg_init_privs), and pg_dump leaves that out.  What
 * is granted by way of this function is not noted, but dumped: it is for
 * roles that another installation would not grant anything, or that may be
 * dropped, which before 17 leaves a note of them behind that no dump can be
 * restored with.
 */
PG_FUNCTION_INFO_V1(idem_execute_grant);
Datum
idem_execute_grant(PG_FUNCTION_ARGS)
{
	bool		in_script = creating_extension;
	char	   *statement;
	List	   *parsed;

	/* With nothing to do, either. */
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
