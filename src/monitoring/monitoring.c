/*-------------------------------------------------------------------------
 *
 * monitoring.c
 *		The data of idem_metrics(), idem_health() and idem_abandoned().
 *
 * Expired records and messages are counted through the indexes that the
 * cleanup and the relays use, with all existing entries.  An old snapshot can
 * keep vacuum from removing millions of dead entries, all at the beginning of
 * the index.  So a call looks at MAX_ENTRIES entries of all indexes together,
 * dead or not, in turns; a count that has not reached its end is marked as
 * incomplete.  If it found only dead entries, it looks at PROBE_ENTRIES *
 * MAX_PROBES more.  If these are dead, too, it is unknown how late the oldest
 * row is.
 *
 * The numbers of due messages and of dead letters raise alarms.  So if such a
 * count is incomplete, LAST_ENTRIES more are looked at from the other end,
 * where the latest ones are, and the count is a lower limit.  If there are
 * none, the number of dead letters is unknown.
 *
 * For a table that calls cannot use, only the fault is reported (see
 * table_faults.c).
 *
 * Times from a dump can be infinite.  A row whose time is minus infinity has
 * been due for an infinite time.
 *
 * Nothing here writes, waits long, or takes a lock stronger than
 * AccessShareLock, so everything works on a hot standby.
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
#include "utils/float.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/varlena.h"

#include "keys/key_record.h"
#include "maintenance/cleanup.h"
#include "monitoring/table_faults.h"
#include "outbox/outbox_row.h"
#include "stats/stats.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/settings.h"
#include "util/times.h"

/* Number of entries that are looked at in all, and of an index in its turn. */
#define MAX_ENTRIES		50000
#define TURN_ENTRIES	1000

/* The same for a bisection, and for counting after it. */
#define PROBE_ENTRIES	250
#define MAX_PROBES		24
#define FOUND_ENTRIES	2000

/* Number of entries from the end of an index; see alerts.yml. */
#define LAST_ENTRIES	12000

/*
 * Number of rows that lead to a lane and are followed; entries of that lane.
 */
#define MAX_SIGNPOSTS	1000
#define LANE_ENTRIES	100

/* The only column of idem_tokens that is used here. */
#define TOKENS_EXPIRES_AT	0

/* The entries of an index that are looked at. */
typedef enum Range
{
	BY_TIME,					/* the time is the first column, up to now */
	ANY_TIME,					/* the same, with future ones */
	ALL,
	NULLS,						/* the first column is NULL */
} Range;

/* A kind of rows to be counted through an index. */
typedef struct Source
{
	const char *name;
	IdemRelationId table;
	IdemRelationId index;
	int			time;			/* column of the table */
	Range		range;
	bool		(*counts) (IdemCursor *cursor); /* NULL: counts all rows */
} Source;

static bool is_ready_message(IdemCursor *outbox);
static bool is_parked_message(IdemCursor *outbox);
static bool is_dead_message(IdemCursor *outbox);

static const Source sources[] = {
	{"keys", IDEM_KEYS, IDEM_KEYS_EXPIRES_AT, KEYS_EXPIRES_AT, BY_TIME},
	{"tokens", IDEM_TOKENS, IDEM_TOKENS_EXPIRES_AT, TOKENS_EXPIRES_AT,
	BY_TIME},
	{"acked", IDEM_OUTBOX, IDEM_OUTBOX_ENDED, OUTBOX_ACKED_AT, BY_TIME},
	{"pending", IDEM_OUTBOX, IDEM_OUTBOX_DUE, OUTBOX_AVAILABLE_AT, ANY_TIME,
	is_ready_message},
	{"pending", IDEM_OUTBOX, IDEM_OUTBOX_LANES, OUTBOX_AVAILABLE_AT, ALL,
	is_parked_message},
	{"dead", IDEM_OUTBOX, IDEM_OUTBOX_ENDED, OUTBOX_AVAILABLE_AT, NULLS,
	is_dead_message},
};

/* The result of counting. */
typedef struct Count
{
	int64		rows;			/* number of visible ones */
	int64		due;			/* of these, those that are due */
	TimestampTz oldest;			/* DT_NOEND: no row */
	TimestampTz last;			/* of the last entry, if sorted by time */
	int			signposts;		/* number of rows that were followed */
	bool		complete;		/* no entry was omitted */
} Count;

static const Count nothing = {0, 0, DT_NOEND, DT_NOBEGIN, 0, false};

/* The state of counting a source. */
typedef struct Counting
{
	const Source *source;
	IdemCursor	cursor;
	TimestampTz until;
	Count		count;
	char	   *fault;			/* if not NULL, nothing above is open */
} Counting;

static double retention(const Source *source);
static bool is_by_time(const Source *source);
static double seconds_between(TimestampTz from, TimestampTz to);
static bool knows_oldest(const Counting *counting);
static void begin_counting(Counting *counting, const Source *source,
						   TimestampTz now);
static void look_from(Counting *counting, TimestampTz from, TimestampTz to);
static int	count_entries(Counting *counting, ScanDirection direction,
						  int limit, Count *count);
static TimestampTz follow_signpost(IdemCursor *outbox);
static void count_past_dead_rows(Counting *counting);
static void count_from_end(Counting *counting);

/*
 * idem_monitoring_data() -> setof (source, counted, due, overdue, complete,
 *
 *									fault)
 *
 * Returns one row for each source.  "counted": expired keys and tokens,
 * acknowledged messages past their retention, pending and dead messages.
 * "overdue": for how many seconds the oldest should have been deleted or, if
 * it is pending, has been due; 0 if there is none, NULL if it is unknown, and
 * for parked messages.  All are NULL if there is a "fault".
 */
PG_FUNCTION_INFO_V1(idem_monitoring_data);
Datum
idem_monitoring_data(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TimestampTz now = GetCurrentTimestamp();
	Counting	countings[lengthof(sources)];
	int			left = MAX_ENTRIES;
	bool		all_complete;

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i < lengthof(sources); i++)
	{
		/* Sources of a table are adjacent, and the table is checked once. */
		countings[i].fault = i > 0 && sources[i].table == sources[i - 1].table ?
		/* cppcheck-suppress uninitvar ; the one before has been set */
			countings[i - 1].fault : idem_table_fault(sources[i].table);
		if (countings[i].fault == NULL)
			begin_counting(&countings[i], &sources[i], now);
	}

	do
	{
		all_complete = true;
		for (int i = 0; i < lengthof(sources); i++)
		{
			Count	   *count = &countings[i].count;

			if (countings[i].fault != NULL)
				continue;
			if (!count->complete)
				left -= count_entries(&countings[i], ForwardScanDirection,
									  Min(TURN_ENTRIES, left), count);
			all_complete &= count->complete;
		}
	} while (!all_complete && left > 0);

	for (int i = 0; i < lengthof(sources); i++)
	{
		const Source *source = &sources[i];
		Count	   *count = &countings[i].count;
		TimestampTz due_at = idem_add_ms(now, -retention(source));
		Datum		values[6] = {0};
		bool		nulls[6] = {false, true, true, true, true, true};

		values[0] = CStringGetTextDatum(source->name);
		if (countings[i].fault != NULL)
		{
			nulls[5] = false;
			values[5] = CStringGetTextDatum(countings[i].fault);
		}
		else
		{
			if (is_by_time(source) && !knows_oldest(&countings[i]))
				count_past_dead_rows(&countings[i]);
			if (!count->complete && source->range != BY_TIME)
				count_from_end(&countings[i]);
			idem_cursor_close(&countings[i].cursor);

			memset(nulls + 1, false, 4);
			nulls[3] = source->index == IDEM_OUTBOX_LANES ||
				(source->index == IDEM_OUTBOX_DUE &&
				 !knows_oldest(&countings[i]));
			values[1] = Int64GetDatum(count->rows);
			values[2] = Int64GetDatum(count->due);
			values[3] = Float8GetDatum(seconds_between(count->oldest, due_at));
			values[4] = BoolGetDatum(count->complete);
		}
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
	}
	return (Datum) 0;
}

/*
 * Return how long rows are kept beyond their time, in milliseconds.
 */
static double
retention(const Source *source)
{
	switch (source->index)
	{
		case IDEM_KEYS_EXPIRES_AT:
			return idem_cleanup_retention(IDEM_CLEANUP_KEYS);
		case IDEM_OUTBOX_ENDED:
			return source->range == BY_TIME ?
				idem_cleanup_retention(IDEM_CLEANUP_MESSAGES) : 0;
		default:
			return 0;
	}
}

/*
 * Is the index of a source sorted by time?
 */
static bool
is_by_time(const Source *source)
{
	return source->range == BY_TIME || source->range == ANY_TIME;
}

/*
 * Return the time from one time to a later, finite one; 0 if that is not
 * later.
 */
static double
seconds_between(TimestampTz from, TimestampTz to)
{
	if (TIMESTAMP_IS_NOBEGIN(from))
		return get_float8_infinity();
	return from < to ? (to - from) / 1e6 : 0;
}

/*
 * Begin to count rows up to now.  An acknowledged message expires only after
 * its retention; a tombstone has expired already.
 */
static void
begin_counting(Counting *counting, const Source *source, TimestampTz now)
{
	counting->source = source;
	counting->until = source->table == IDEM_OUTBOX ?
		idem_add_ms(now, -retention(source)) : now;
	counting->count = nothing;
	idem_cursor_open(&counting->cursor, source->table, AccessShareLock);
	look_from(counting, DT_NOBEGIN,
			  source->range == BY_TIME ? counting->until : DT_NOEND);
}

/*
 * Was a row with a time found, or was everything that can be late looked at?
 */
static bool
knows_oldest(const Counting *counting)
{
	const Count *count = &counting->count;

	return count->complete || count->oldest != DT_NOEND ||
		count->last > counting->until;
}

/*
 * Begin at the first entry whose time is from "from" to "until".  If the
 * source is not sorted by time, begin at its first entry.
 */
static void
look_from(Counting *counting, TimestampTz from, TimestampTz to)
{
	ScanKeyData keys[2];
	int			nkeys = 0;

	if (counting->source->range == NULLS)
		idem_key_null(&keys[nkeys++], 1);
	else if (counting->source->range != ALL)
	{
		idem_key_time(&keys[nkeys++], 1, BTGreaterEqualStrategyNumber, from);
		idem_key_time(&keys[nkeys++], 1, BTLessEqualStrategyNumber, to);
	}
	idem_scan_entries(&counting->cursor, counting->source->index, keys, nkeys);
}

/*
 * Look at the next entries, at most "limit", and add their rows to "count".
 * Returns the number of entries.
 */
static int
count_entries(Counting *counting, ScanDirection direction, int limit,
			  Count *count)
{
	const Source *source = counting->source;

	for (int n = 0; n < limit; n++)
	{
		Datum		first;
		bool		visible;
		bool		isnull;
		TimestampTz time;

		CHECK_FOR_INTERRUPTS();
		if (!idem_scan_entry(&counting->cursor, direction, 1, &first,
							 &visible))
		{
			count->complete = true;
			return n;
		}
		if (is_by_time(source))
			count->last = DatumGetTimestampTz(first);
		if (!visible)
			continue;
		if (source->counts != NULL && !source->counts(&counting->cursor))
		{
			if (source->index == IDEM_OUTBOX_DUE &&
				count->oldest == DT_NOEND &&
				count->signposts++ < MAX_SIGNPOSTS)
				count->oldest = follow_signpost(&counting->cursor);
			continue;
		}
		time = DatumGetTimestampTz(slot_getattr(counting->cursor.row,
												source->time + 1, &isnull));
		count->rows++;
		if (time <= counting->until)
			count->due++;
		/* A parked message waits for an earlier one, not for a relay. */
		if (source->index != IDEM_OUTBOX_LANES)
			count->oldest = Min(count->oldest, time);
	}
	return limit;
}

/*
 * A row of the due index is not pending.  Return since when the message has
 * been due to which it leads a take; DT_NOEND if there is none.
 */
static TimestampTz
follow_signpost(IdemCursor *outbox)
{
	const Datum *signpost = outbox->row->tts_values;
	TimestampTz due = DT_NOEND;
	IdemCursor	heads;
	ScanKeyData key;

	if (outbox->row->tts_isnull[OUTBOX_KEY_HASH])
		return DT_NOEND;
	idem_key_int8(&key, LANES_LANE, BTEqualStrategyNumber,
				  DatumGetInt64(signpost[OUTBOX_KEY_HASH]));
	idem_cursor_open_beside(&heads, outbox);
	idem_scan_entries(&heads, IDEM_OUTBOX_LANES, &key, 1);
	for (int n = 0; n < LANE_ENTRIES; n++)
	{
		Datum		lane;
		bool		visible;

		if (!idem_scan_entry(&heads, ForwardScanDirection, 1, &lane, &visible))
			break;
		if (!visible)
			continue;
		slot_getallattrs(heads.row);
		due = Max(DatumGetTimestampTz(signpost[OUTBOX_AVAILABLE_AT]),
				  DatumGetTimestampTz(heads.row->tts_values[OUTBOX_AVAILABLE_AT]));
		break;
	}
	idem_cursor_close(&heads);
	return due;
}

static bool
is_ready_message(IdemCursor *outbox)
{
	slot_getallattrs(outbox->row);
	return idem_outbox_in_state(outbox, "pending");
}

static bool
is_parked_message(IdemCursor *outbox)
{
	slot_getallattrs(outbox->row);
	return !DatumGetBool(outbox->row->tts_values[OUTBOX_IN_DUE_INDEX]);
}

static bool
is_dead_message(IdemCursor *outbox)
{
	slot_getallattrs(outbox->row);
	return idem_outbox_in_state(outbox, "dead");
}

/*
 * All of the oldest rows are dead, and vacuum could not remove them.  The
 * cleanup deletes rows in order of time, and relays take messages in that
 * order.  So a bisection finds the remaining rows, except some that were
 * skipped.
 */
static void
count_past_dead_rows(Counting *counting)
{
	TimestampTz from = Max(counting->count.last, MIN_TIMESTAMP);
	TimestampTz to = counting->until;
	bool		found = false;

	for (int i = 0; i < MAX_PROBES && from < to; i++)
	{
		TimestampTz middle = from + (to - from) / 2;
		Count		probe = nothing;

		look_from(counting, middle, to);
		(void) count_entries(counting, ForwardScanDirection, PROBE_ENTRIES,
							 &probe);
		if (probe.oldest != DT_NOEND)
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
	{
		look_from(counting, to, counting->until);
		(void) count_entries(counting, ForwardScanDirection, FOUND_ENTRIES,
							 &counting->count);
	}
	counting->count.complete = false;
}

/*
 * The count is incomplete, so also look at the last entries up to now.  Some
 * might have been counted before, so the lower limit is the greater of the
 * two numbers.
 */
static void
count_from_end(Counting *counting)
{
	Count	   *count = &counting->count;
	Count		last = nothing;
	int64		waiting = count->rows - count->due;

	last.signposts = MAX_SIGNPOSTS;
	look_from(counting, DT_NOBEGIN, counting->until);
	(void) count_entries(counting, BackwardScanDirection, LAST_ENTRIES, &last);
	count->due = Max(count->due, last.due);
	count->rows = count->due + Max(waiting, last.rows - last.due);
}

/*
 * idem_worker_absence() -> text
 *
 * Returns why no background worker visits this database, as a clause; NULL if
 * one should.
 */
PG_FUNCTION_INFO_V1(idem_worker_absence);
Datum
idem_worker_absence(PG_FUNCTION_ARGS)
{
	List	   *names;

	if (RecoveryInProgress())
		PG_RETURN_TEXT_P(cstring_to_text("this server is a standby"));
	if (!idem_has_launcher)
		PG_RETURN_TEXT_P(cstring_to_text("idempotency is not in shared_preload_libraries"));
	if (idem_cleanup_interval == 0)
		PG_RETURN_TEXT_P(cstring_to_text("idempotency.cleanup_interval is zero"));

	(void) SplitIdentifierString(pstrdup(idem_databases), ',', &names);
	if (idem_is_listed(names, get_database_name(MyDatabaseId)))
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text("idempotency.databases does not name this database"));
}

/*
 * idem_check_interval(value, name) -> void
 *
 * Raises 22004 for a NULL, 22023 for a negative interval.  "name" is its name
 * in the message.
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
