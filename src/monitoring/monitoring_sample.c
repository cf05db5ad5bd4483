/*-------------------------------------------------------------------------
 *
 * monitoring_sample.c
 *		Estimates of idem_metrics() and idem_health() from parts of a table.
 *
 * Figures that no index gives are estimated from a sample of at most
 * SAMPLE_PAGES pages, from all parts of a table.  The newest rows are looked
 * for where they probably are: at the end of an index, and of the table.
 *
 * Times from a dump can be infinite.  Minus infinity is in the past.  Neither
 * says anything about the clock.
 *
 * For a table that calls cannot use, only the fault is reported (see
 * table_faults.c).  Nothing here writes, waits long, or takes a lock stronger
 * than AccessShareLock, so everything works on a hot standby.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "keys/key_record.h"
#include "monitoring/table_faults.h"
#include "outbox/outbox_row.h"
#include "stats/stats.h"
#include "store/page_sample.h"
#include "store/pg_sequence.h"
#include "store/store.h"
#include "util/compat.h"
#include "util/times.h"

/* Number of pages in a sample of a table. */
#define SAMPLE_PAGES	1000

/*
 * Number of entries of an index, and pages of a table, that count as newest.
 */
#define NEWEST_ENTRIES	1000
#define NEWEST_PAGES	64

/* A claim is stuck if its lease has been over for this time. */
#define STUCK_AFTER_MS	60000

/* The only column of idem_tokens that is used here. */
#define TOKENS_EXPIRES_AT	0

/* The result of a sample. */
typedef struct Findings
{
	int64		rows;
	int64		live;
	int64		stuck;
	int64		stuck_pages;	/* number of pages with stuck claims */
	TimestampTz newest;
	int64		highest_token;
} Findings;

/* Where the newest rows of a table are. */
typedef struct NewestPlace
{
	const char *name;
	IdemRelationId table;
	IdemRelationId index;		/* they are probably at its end */
	int			time;			/* column with the time of insertion */
} NewestPlace;

static const NewestPlace places[] = {
	{"the newest message", IDEM_OUTBOX, IDEM_PRIMARY_KEY, OUTBOX_CREATED_AT},
	{"a claim", IDEM_KEYS, IDEM_KEYS_EXPIRES_AT, KEYS_CREATED_AT},
};

static void look_at_keys(IdemSample *sample, TimestampTz now,
						 Findings *findings);
static void look_at_tokens(IdemSample *sample, TimestampTz now,
						   Findings *findings);
static TimestampTz newest_at(const NewestPlace *place);
static TimestampTz newest_of_index(IdemCursor *cursor, IdemRelationId index,
								   int column);
static TimestampTz newest_of_pages(IdemCursor *cursor, int column);
static TimestampTz row_time(TupleTableSlot *row, int column);
static TimestampTz later(TimestampTz a, TimestampTz b);
static void put_if_behind(ReturnSetInfo *rsinfo, IdemRelationId sequence,
						  int64 highest);
static int64 highest_message(void);

/*
 * idem_sample_data(source) -> setof (share, live_share, stuck, stuck_pages,
 *
 *									  newest, highest_token, fault)
 *
 * Returns one row about a sample of the table of "keys" or "tokens": which
 * share of the table it is, and which share of its rows has not expired.  For
 * keys, also the number of stuck claims and of their pages, the time of the
 * newest, and the highest claim token.  All are NULL if there is a "fault".
 */
PG_FUNCTION_INFO_V1(idem_sample_data);
Datum
idem_sample_data(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	char	   *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	bool		of_keys = strcmp(name, "keys") == 0;
	IdemRelationId id = of_keys ? IDEM_KEYS : IDEM_TOKENS;
	char	   *fault;
	IdemCursor	cursor;
	IdemSample	sample;
	Findings	findings = {.newest = DT_NOBEGIN};
	Datum		values[7] = {0};
	bool		nulls[7] = {true, true, true, true, true, true, true};

	if (!of_keys && strcmp(name, "tokens") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("there is no table of \"%s\"", name)));
	InitMaterializedSRF(fcinfo, 0);
	fault = idem_table_fault(id);
	if (fault != NULL)
	{
		nulls[6] = false;
		values[6] = CStringGetTextDatum(fault);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
		return (Datum) 0;
	}

	idem_cursor_open(&cursor, id, AccessShareLock);
	idem_sample_begin(&sample, &cursor, SAMPLE_PAGES);
	if (of_keys)
		look_at_keys(&sample, GetCurrentTimestamp(), &findings);
	else
		look_at_tokens(&sample, GetCurrentTimestamp(), &findings);
	idem_sample_end(&sample);
	idem_cursor_close(&cursor);

	nulls[0] = false;
	values[0] = Float8GetDatum(sample.share);
	nulls[1] = findings.rows == 0;
	if (!nulls[1])
		values[1] = Float8GetDatum((double) findings.live / findings.rows);
	nulls[2] = false;
	values[2] = Int64GetDatum(findings.stuck);
	nulls[3] = false;
	values[3] = Int64GetDatum(findings.stuck_pages);
	nulls[4] = TIMESTAMP_IS_NOBEGIN(findings.newest);
	values[4] = TimestampTzGetDatum(findings.newest);
	nulls[5] = !of_keys;
	values[5] = Int64GetDatum(findings.highest_token);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	return (Datum) 0;
}

static void
look_at_keys(IdemSample *sample, TimestampTz now, Findings *findings)
{
	TupleTableSlot *row = sample->cursor->row;
	const Datum *values = row->tts_values;
	TimestampTz stuck_before = idem_add_ms(now, -STUCK_AFTER_MS);
	BlockNumber stuck_page = InvalidBlockNumber;

	while (idem_sample_next(sample))
	{
		bool		live;

		CHECK_FOR_INTERRUPTS();
		slot_getsomeattrs(row, KEYS_STATE + 1);
		live = now < DatumGetTimestampTz(values[KEYS_EXPIRES_AT]);
		findings->rows++;
		findings->live += live;
		findings->newest = later(findings->newest,
								 DatumGetTimestampTz(values[KEYS_CREATED_AT]));
		findings->highest_token = Max(findings->highest_token,
									  DatumGetInt64(values[KEYS_CLAIM_TOKEN]));
		if (live && idem_found_state(sample->cursor) == IDEM_STATE_STARTED &&
			!row->tts_isnull[KEYS_LEASE_EXPIRES_AT] &&
			DatumGetTimestampTz(values[KEYS_LEASE_EXPIRES_AT]) < stuck_before)
		{
			BlockNumber page = ItemPointerGetBlockNumber(&row->tts_tid);

			findings->stuck++;
			findings->stuck_pages += page != stuck_page;
			stuck_page = page;
		}
	}
}

static void
look_at_tokens(IdemSample *sample, TimestampTz now, Findings *findings)
{
	TupleTableSlot *row = sample->cursor->row;

	while (idem_sample_next(sample))
	{
		CHECK_FOR_INTERRUPTS();
		slot_getsomeattrs(row, TOKENS_EXPIRES_AT + 1);
		findings->rows++;
		if (now < DatumGetTimestampTz(row->tts_values[TOKENS_EXPIRES_AT]))
			findings->live++;
	}
}

/*
 * idem_clock_evidence() -> setof (name, latest)
 *
 * Returns the latest recorded times that a clock might have shown; NULL if
 * nothing was found.
 */
PG_FUNCTION_INFO_V1(idem_clock_evidence);
Datum
idem_clock_evidence(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (int i = -1; i < (int) lengthof(places); i++)
	{
		TimestampTz latest = i < 0 ? idem_latest_clock() :
			newest_at(&places[i]);
		Datum		values[2];
		bool		nulls[2] = {0};

		values[0] = CStringGetTextDatum(i < 0 ?
										"a time that this server's clock has shown" :
										places[i].name);
		values[1] = TimestampTzGetDatum(latest);
		nulls[1] = TIMESTAMP_NOT_FINITE(latest);
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 values, nulls);
	}
	return (Datum) 0;
}

/*
 * Return the insertion time of the newest row in the places where the newest
 * rows should be; DT_NOBEGIN if there is none, or the table cannot be used.
 */
static TimestampTz
newest_at(const NewestPlace *place)
{
	IdemCursor	cursor;
	TimestampTz newest;

	if (idem_table_fault(place->table) != NULL)
		return DT_NOBEGIN;
	idem_cursor_open(&cursor, place->table, AccessShareLock);
	newest = later(newest_of_index(&cursor, place->index, place->time),
				   newest_of_pages(&cursor, place->time));
	idem_cursor_close(&cursor);
	return newest;
}

/*
 * Return the newest time in the rows of the last NEWEST_ENTRIES of an index.
 */
static TimestampTz
newest_of_index(IdemCursor *cursor, IdemRelationId index, int column)
{
	Datum		first;
	bool		visible;
	TimestampTz newest = DT_NOBEGIN;

	idem_scan_entries(cursor, index, NULL, 0);
	for (int i = 0; i < NEWEST_ENTRIES; i++)
	{
		CHECK_FOR_INTERRUPTS();
		if (!idem_scan_entry(cursor, BackwardScanDirection, 1, &first, &visible))
			break;
		if (visible)
			newest = later(newest, row_time(cursor->row, column));
	}
	idem_scan_end(cursor);
	return newest;
}

/*
 * Return the newest time in the last NEWEST_PAGES of a table, to which new
 * rows go unless vacuum has freed space elsewhere.
 */
static TimestampTz
newest_of_pages(IdemCursor *cursor, int column)
{
	IdemSample	sample;
	TimestampTz newest = DT_NOBEGIN;

	idem_sample_begin_last(&sample, cursor, NEWEST_PAGES);
	while (idem_sample_next(&sample))
	{
		CHECK_FOR_INTERRUPTS();
		newest = later(newest, row_time(cursor->row, column));
	}
	idem_sample_end(&sample);
	return newest;
}

/*
 * Return a time that is never NULL.
 */
static TimestampTz
row_time(TupleTableSlot *row, int column)
{
	bool		isnull;

	return DatumGetTimestampTz(slot_getattr(row, column + 1, &isnull));
}

/*
 * Return the later of two times.  Infinite ones do not count.
 */
static TimestampTz
later(TimestampTz a, TimestampTz b)
{
	return TIMESTAMP_NOT_FINITE(b) ? a : Max(a, b);
}

/*
 * idem_sequences_behind(highest_token) -> setof (name, behind)
 *
 * Returns the sequences that are below a number in use, as after a restore
 * without them, and by how much.  "highest_token" can be NULL.  A number is
 * drawn before its row is written, so the caller must have read the rows
 * before.
 */
PG_FUNCTION_INFO_V1(idem_sequences_behind);
Datum
idem_sequences_behind(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	if (idem_table_fault(IDEM_OUTBOX) == NULL &&
		idem_table_fault(IDEM_OUTBOX_IDS) == NULL)
		put_if_behind(rsinfo, IDEM_OUTBOX_IDS, highest_message());
	if (!PG_ARGISNULL(0) && idem_table_fault(IDEM_CLAIM_TOKENS) == NULL)
		put_if_behind(rsinfo, IDEM_CLAIM_TOKENS, PG_GETARG_INT64(0));
	return (Datum) 0;
}

static void
put_if_behind(ReturnSetInfo *rsinfo, IdemRelationId sequence, int64 highest)
{
	int64		behind = highest - idem_sequence_last(sequence);
	Datum		values[2];
	bool		nulls[2] = {0};

	if (behind <= 0)
		return;
	values[0] = CStringGetTextDatum(idem_relation_name(sequence));
	values[1] = Int64GetDatum(behind);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * Return the highest id of the last messages; 0 if all of NEWEST_ENTRIES are
 * dead.
 */
static int64
highest_message(void)
{
	IdemCursor	outbox;
	Datum		first;
	bool		visible = false;
	int64		highest = 0;

	idem_cursor_open(&outbox, IDEM_OUTBOX, AccessShareLock);
	idem_scan_entries(&outbox, IDEM_PRIMARY_KEY, NULL, 0);
	for (int i = 0; i < NEWEST_ENTRIES && !visible; i++)
	{
		CHECK_FOR_INTERRUPTS();
		if (!idem_scan_entry(&outbox, BackwardScanDirection, 1, &first, &visible))
			break;
		if (visible)
			highest = DatumGetInt64(first);
	}
	idem_cursor_close(&outbox);
	return highest;
}
