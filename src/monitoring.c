/*-------------------------------------------------------------------------
 *
 * monitoring.c
 *		What idem_metrics(), idem_health() and idem_stuck() cannot do in SQL.
 *
 * Expired records and messages are counted through the indexes that the
 * cleanup and the relays use, with all row versions that are still there.  An
 * old snapshot can keep vacuum from removing millions of dead ones, all of
 * them at the beginning of the index, and SQL can bound only how many rows it
 * sees, not how many it passes.  Here a count ends after MAX_ENTRIES entries
 * of an index, dead or not, and says that it is not complete.
 *
 * Nothing here writes, locks more than AccessShareLock, or waits; all of it
 * works on a hot standby.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/stratnum.h"
#include "access/xlog.h"
#include "commands/dbcommands.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/varlena.h"

#include "compat.h"
#include "cleanup.h"
#include "idempotency.h"
#include "key_record.h"
#include "outbox.h"
#include "settings.h"
#include "store.h"
#include "worker.h"

/* How many entries of an index are looked at, at most; and by a probe. */
#define MAX_ENTRIES		100000
#define PROBE_ENTRIES	1000
#define MAX_PROBES		24

/* idem_tokens has no other use for the numbers of its columns. */
#define TOKENS_EXPIRES_AT	0

/* Something to be counted, through an index that holds nothing else. */
typedef struct Source
{
	const char *name;
	IdemRelationId table;
	IdemRelationId index;
	int			time;			/* column of the table */
	bool		by_time;		/* is it the first column of the index? */
} Source;

static const Source sources[] = {
	{"keys", IDEM_KEYS, IDEM_KEYS_EXPIRES_AT, KEYS_EXPIRES_AT, true},
	{"tokens", IDEM_TOKENS, IDEM_TOKENS_EXPIRES_AT, TOKENS_EXPIRES_AT, true},
	{"acked", IDEM_OUTBOX, IDEM_OUTBOX_ACKED, OUTBOX_ACKED_AT, true},
	{"pending", IDEM_OUTBOX, IDEM_OUTBOX_DUE, OUTBOX_AVAILABLE_AT, false},
	{"pending", IDEM_OUTBOX, IDEM_OUTBOX_LANES, OUTBOX_AVAILABLE_AT, false},
	{"dead", IDEM_OUTBOX, IDEM_OUTBOX_DEAD, OUTBOX_AVAILABLE_AT, false},
};

/* What was found. */
typedef struct Count
{
	int64		rows;			/* visible ones */
	int64		due;			/* of them, those whose time has come */
	TimestampTz oldest;			/* DT_NOEND: no row */
	TimestampTz last;			/* of the last entry, visible or not */
	bool		complete;		/* no entry was left out */
} Count;

static const Count nothing = {0, 0, DT_NOEND, DT_NOBEGIN, true};

static TimestampTz counted_until(const Source *source, TimestampTz now);
static double retention(const Source *source);
static void count_source(const Source *source, TimestampTz now, Count *count);
static void count_past_dead_rows(IdemScan *scan, const Source *source,
								 TimestampTz until, Count *count);
static void count_between(IdemScan *scan, const Source *source,
						  TimestampTz from, TimestampTz until, int limit,
						  Count *count);

/*
 * idem_monitoring_data() -> setof (source, counted, due, overdue, complete)
 *
 * One row for each source.  "counted": expired keys and tokens, acknowledged
 * messages past their retention, pending and dead messages.  "overdue": for
 * how many seconds the oldest should have been deleted, or, if it is pending,
 * has been due; 0 if there is none.
 */
PG_FUNCTION_INFO_V1(idem_monitoring_data);
Datum
idem_monitoring_data(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TimestampTz now = GetCurrentTimestamp();

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i < lengthof(sources); i++)
	{
		const Source *source = &sources[i];
		TimestampTz due_at = idem_add_ms(now, -retention(source));
		Count		count = nothing;
		Datum		values[5];
		bool		nulls[5] = {0};

		count_source(source, now, &count);
		values[0] = CStringGetTextDatum(source->name);
		values[1] = Int64GetDatum(count.rows);
		values[2] = Int64GetDatum(count.due);
		values[3] = Float8GetDatum(count.oldest < due_at ?
								   (due_at - count.oldest) / 1e6 : 0);
		values[4] = BoolGetDatum(count.complete);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
	}
	return (Datum) 0;
}

/*
 * How long rows are kept beyond their time, in milliseconds.
 */
static double
retention(const Source *source)
{
	switch (source->index)
	{
		case IDEM_KEYS_EXPIRES_AT:
			return idem_cleanup_retention(IDEM_CLEANUP_KEYS);
		case IDEM_OUTBOX_ACKED:
			return idem_cleanup_retention(IDEM_CLEANUP_MESSAGES);
		default:
			return 0;
	}
}

/*
 * Up to which time rows are counted.  An acknowledged message has not expired
 * before its retention is over; a tombstone has.
 */
static TimestampTz
counted_until(const Source *source, TimestampTz now)
{
	return source->index == IDEM_OUTBOX_ACKED ?
		idem_add_ms(now, -retention(source)) : now;
}

static void
count_source(const Source *source, TimestampTz now, Count *count)
{
	IdemTable	table;
	IdemScan	scan;
	TimestampTz until = counted_until(source, now);

	idem_table_open(&table, source->table, AccessShareLock);
	idem_scan_begin(&scan, &table, source->index, SnapshotAny,
					source->by_time ? 2 : 0);
	count_between(&scan, source, DT_NOBEGIN, until, MAX_ENTRIES, count);
	if (source->by_time && !count->complete && count->rows == 0)
		count_past_dead_rows(&scan, source, until, count);
	idem_scan_end(&scan);
	idem_table_close(&table);
}

/*
 * All of the oldest rows are dead, and vacuum could not remove them.  The
 * cleanup deletes in the order of time, so the rows that are left can be
 * found by bisection, up to some that it skipped.
 */
static void
count_past_dead_rows(IdemScan *scan, const Source *source, TimestampTz until,
					 Count *count)
{
	TimestampTz from = count->last;
	TimestampTz to = until;
	bool		found = false;

	for (int i = 0; i < MAX_PROBES && from < to; i++)
	{
		TimestampTz middle = from + (to - from) / 2;
		Count		probe = nothing;

		count_between(scan, source, middle, to, PROBE_ENTRIES, &probe);
		if (probe.rows > 0)
		{
			to = probe.oldest;
			found = true;
		}
		else if (probe.complete)
			to = middle;
		else
			from = probe.last;
	}

	if (found)
		count_between(scan, source, to, until, MAX_ENTRIES, count);
	count->complete = false;
}

/*
 * Add to "count" what the index has from one time until another, or, if its
 * first column is no time, what it has; "limit" entries at most.
 */
static void
count_between(IdemScan *scan, const Source *source, TimestampTz from,
			  TimestampTz until, int limit, Count *count)
{
	Snapshot	snapshot = GetActiveSnapshot();
	ScanKeyData keys[2];

	ScanKeyEntryInitialize(&keys[0], 0, 1, BTGreaterEqualStrategyNumber,
						   InvalidOid, InvalidOid, F_TIMESTAMPTZ_GE,
						   TimestampTzGetDatum(from));
	ScanKeyEntryInitialize(&keys[1], 0, 1, BTLessEqualStrategyNumber,
						   InvalidOid, InvalidOid, F_TIMESTAMPTZ_LE,
						   TimestampTzGetDatum(until));
	idem_scan_restart(scan, source->by_time ? keys : NULL);

	while (idem_scan_next(scan, ForwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		if (limit-- == 0)
		{
			count->complete = false;
			break;
		}
		count->last =
			DatumGetTimestampTz(scan->table->row->tts_values[source->time]);
		if (!idem_scan_row_visible(scan, snapshot))
			continue;
		count->rows++;
		if (count->last <= until)
			count->due++;
		count->oldest = Min(count->oldest, count->last);
	}
}

/*
 * idem_worker_absence() -> text
 *
 * Why no background worker comes to this database, as a clause; NULL if one
 * should.
 */
PG_FUNCTION_INFO_V1(idem_worker_absence);
Datum
idem_worker_absence(PG_FUNCTION_ARGS)
{
	List	   *names;

	if (RecoveryInProgress())
		PG_RETURN_TEXT_P(cstring_to_text("this server is a standby"));
	if (!idem_preloaded)
		PG_RETURN_TEXT_P(cstring_to_text("idempotency is not in shared_preload_libraries"));
	if (idem_cleanup_interval == 0)
		PG_RETURN_TEXT_P(cstring_to_text("idempotency.cleanup_interval is zero"));

	if (SplitIdentifierString(pstrdup(idem_databases), ',', &names) &&
		idem_is_listed(names, get_database_name(MyDatabaseId)))
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text("idempotency.databases does not name this database"));
}

/*
 * idem_check_interval(value, name) -> void
 *
 * Raises 22004 for a NULL, 22023 for a negative interval, calling it "name".
 */
PG_FUNCTION_INFO_V1(idem_check_interval);
Datum
idem_check_interval(PG_FUNCTION_ARGS)
{
	Datum		arg = idem_required_arg(fcinfo, 1, "name");
	const char *name = text_to_cstring(DatumGetTextPP(arg));

	(void) idem_required_arg(fcinfo, 0, name);
	(void) idem_interval_arg(fcinfo, 0, name);
	PG_RETURN_VOID();
}

/*
 * idem_redacted_key(key) -> text
 */
PG_FUNCTION_INFO_V1(idem_redacted_key_text);
Datum
idem_redacted_key_text(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(cstring_to_text(idem_redacted_key(PG_GETARG_DATUM(0))));
}
