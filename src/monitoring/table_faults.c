/*-------------------------------------------------------------------------
 *
 * table_faults.c
 *		Checking whether the extension's tables can be used, without an error.
 *
 * An altered or locked table stops the calls that need it.  Monitoring must
 * still work, because it reports this.  So it checks a table here before it
 * opens it.
 *
 * If a table has no fault, the table, its indexes and sequence are locked
 * from then on, as calls lock them to read, or to draw a number.  So they
 * stay as they were found, except for changes that this lock allows, such as
 * CREATE TRIGGER.  For such a lock a call waits no longer than LOCK_WAIT_MS.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "monitoring/table_faults.h"
#include "store/store.h"
#include "util/compat.h"
#include "util/subtransaction.h"
#include "util/timed_lock.h"
#include "util/times.h"

/* How long to wait for a lock, which might be released soon. */
#define LOCK_WAIT_MS	200

/* A table, and the result of its check. */
typedef struct Look
{
	IdemRelationId id;
	bool		is_locked;
} Look;

static bool open_and_close(void *arg);
static void open_all(void *arg);
static bool is_fault(int sqlstate);

/*
 * Return why calls cannot use one of our tables, with its indexes, or a
 * sequence; NULL if they can.
 */
char *
idem_table_fault(IdemRelationId id)
{
	Look		look = {id};
	ErrorData  *error = idem_in_subtransaction(open_and_close, &look, is_fault);

	if (error != NULL)
		return error->message;
	return look.is_locked ?
		psprintf("\"%s\" is locked", idem_relation_name(id)) : NULL;
}

/*
 * Open the table and all that belongs to it, and close it again, keeping the
 * locks, unless another session holds a conflicting one.
 */
static bool
open_and_close(void *arg)
{
	Look	   *look = arg;
	TimestampTz deadline = idem_add_ms(GetCurrentTimestamp(), LOCK_WAIT_MS);

	look->is_locked = !idem_sleep_until(open_all, &look->id, deadline);
	return !look->is_locked;
}

static void
open_all(void *arg)
{
	IdemRelationId id = *(IdemRelationId *) arg;
	IdemCursor	cursor;

	if (idem_relation_kind(id) == IDEM_SEQUENCE)
	{
		(void) idem_sequence_oid(id);
		return;
	}
	idem_cursor_open(&cursor, id, AccessShareLock);
	for (id++; id < IDEM_NUM_RELATIONS &&
		 idem_relation_kind(id) != IDEM_TABLE; id++)
	{
		if (idem_relation_kind(id) == IDEM_INDEX)
			index_close(idem_index_open(id, cursor.table->rel), NoLock);
	}
	idem_cursor_close(&cursor);
}

/*
 * Is this SQLSTATE a table fault, or the error of a wait for a table?
 */
static bool
is_fault(int sqlstate)
{
	return sqlstate == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE ||
		sqlstate == ERRCODE_WRONG_OBJECT_TYPE ||
		sqlstate == ERRCODE_LOCK_NOT_AVAILABLE ||
		sqlstate == ERRCODE_T_R_DEADLOCK_DETECTED;
}

/*
 * idem_table_faults() -> setof (table_name, fault)
 *
 * Returns a row for each table and sequence; "fault" is NULL if there is
 * none.
 */
PG_FUNCTION_INFO_V1(idem_table_faults);
Datum
idem_table_faults(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (IdemRelationId id = 0; id < IDEM_NUM_RELATIONS; id++)
	{
		char	   *fault;
		Datum		values[2];
		bool		nulls[2] = {0};

		if (idem_relation_kind(id) == IDEM_INDEX)
			continue;
		fault = idem_table_fault(id);
		values[0] = CStringGetTextDatum(idem_relation_name(id));
		nulls[1] = fault == NULL;
		values[1] = nulls[1] ? (Datum) 0 : CStringGetTextDatum(fault);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
	}
	return (Datum) 0;
}
