/*-------------------------------------------------------------------------
 *
 * outbox_take.c
 *		Handing out messages of the outbox, in order, to any number of relays.
 *
 * Order.  Messages with a key belong to a lane, a hash of topic and key, and
 * leave it in order of their ids.  A relay that takes from a lane begins with
 * the oldest pending message, the head, and goes on only as long as each next
 * one is available, so a head that is leased, pausing or delayed holds the
 * lane up.  Two relays cannot take from one lane at once: both would begin by
 * writing the head, by compare and swap, and the later one gives the lane up.
 * A message in the second half of its attempts is the last one taken from its
 * lane: each take counts as an attempt, and one that keeps failing must not
 * use up the attempts of those behind it.
 *
 * Cost.  Two partial indexes hold the pending messages only.
 * idem_outbox_due has those without a key, by topic and time; what is not yet
 * available lies beyond the end of the scan.  idem_outbox_lanes has those
 * with a key, by topic and lane; a lane whose head is not available is left
 * with one descent of the index, however long it is.  Scans of the lanes
 * begin at a random one, so that no lane starves and relays seldom meet.
 *
 * Relays never wait for each other or for publishers when they take, and
 * publishers never wait at all.  A message whose transaction commits late is
 * simply found later: there is no cursor that could pass it by.
 *
 * Snapshots.  A call scans with one copy of a snapshot, which therefore does
 * not see what the call itself has written.  Under REPEATABLE READ and
 * SERIALIZABLE that is the transaction's, and a message may have come to stand
 * before others of its lane since: it was requeued, or its transaction was
 * late.  A second scan, with a new snapshot, looks for such, and what stands
 * behind one stays.  So does, by compare and swap, what stands behind one that
 * has been changed since.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/skey.h"
#include "access/stratnum.h"
#include "catalog/pg_collation_d.h"
#include "common/pg_prng.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "idempotency.h"
#include "outbox.h"
#include "settings.h"
#include "stats.h"
#include "store.h"

/* The columns of idem_outbox_take()'s result, in order. */
static const int take_columns[] = {
	OUTBOX_ID,
	OUTBOX_MESSAGE_ID,
	OUTBOX_TOPIC,
	OUTBOX_MESSAGE_KEY,
	OUTBOX_PAYLOAD,
	OUTBOX_HEADERS,
	OUTBOX_ATTEMPT,
	OUTBOX_CREATED_AT,
};

/* The columns of idem_outbox_due and idem_outbox_lanes, from 1. */
#define DUE_TOPIC			1
#define DUE_AVAILABLE_AT	2
#define LANES_TOPIC			1
#define LANES_LANE			2
#define LANES_ID			3

/* What NULL stands for. */
#define DEFAULT_MAX_MESSAGES	100
#define DEFAULT_LEASE_MS	(30 * 1000.0)

/* A call of idem_outbox_take(). */
typedef struct Taking
{
	IdemTable	outbox;
	Snapshot	snapshot;
	IdemTable	newer;			/* the table again, for is_overtaken() */
	Snapshot	newer_snapshot; /* NULL where "snapshot" is a new one itself */
	TimestampTz now;
	TimestampTz lease_expires_at;
	int			wanted;			/* how many more messages */
	ReturnSetInfo *result;
} Taking;

static int	topics_arg(Datum array, Datum **topics);
static int	list_topics(Taking *taking, Datum **topics);
static int	sort_topics(Datum *topics, int count);
static int	compare_topics(const void *a, const void *b, void *arg);
static void take_topics(Taking *taking, const Datum *topics, int count);
static void take_topic(Taking *taking, Datum topic);
static void take_due(Taking *taking, Datum topic);
static void take_lanes(Taking *taking, Datum topic, int64 from, bool below);
static bool is_overtaken(Taking *taking, int64 passed);
static bool take_row(Taking *taking);

/*
 * idem_outbox_take(max_messages, lease, topics) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_outbox_take);
Datum
idem_outbox_take(PG_FUNCTION_ARGS)
{
	Taking		taking;
	Interval   *lease = idem_interval_arg(fcinfo, 1, "lease");
	Datum	   *topics;
	int			ntopics = 0;

	taking.wanted = PG_ARGISNULL(0) ? DEFAULT_MAX_MESSAGES :
		PG_GETARG_INT32(0);
	if (taking.wanted < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "max_messages")));
	InitMaterializedSRF(fcinfo, 0);
	taking.result = (ReturnSetInfo *) fcinfo->resultinfo;
	if (!PG_ARGISNULL(2))
		ntopics = topics_arg(PG_GETARG_DATUM(2), &topics);

	idem_table_open(&taking.outbox, IDEM_OUTBOX, RowExclusiveLock);
	taking.now = GetCurrentTimestamp();
	taking.lease_expires_at = idem_add_interval(taking.now, lease,
												DEFAULT_LEASE_MS);

	/* That of REPEATABLE READ goes on with the transaction unless copied. */
	PushCopiedSnapshot(GetTransactionSnapshot());
	taking.snapshot = GetActiveSnapshot();
	taking.newer_snapshot = NULL;
	if (IsolationUsesXactSnapshot())
	{
		idem_table_open(&taking.newer, IDEM_OUTBOX, AccessShareLock);
		taking.newer_snapshot = RegisterSnapshot(GetLatestSnapshot());
	}

	if (PG_ARGISNULL(2))
		ntopics = list_topics(&taking, &topics);
	take_topics(&taking, topics, ntopics);

	if (taking.newer_snapshot != NULL)
	{
		UnregisterSnapshot(taking.newer_snapshot);
		idem_table_close(&taking.newer);
	}
	PopActiveSnapshot();
	idem_table_close(&taking.outbox);
	return (Datum) 0;
}

/*
 * The topics of an array, as from sort_topics().
 */
static int
topics_arg(Datum array, Datum **topics)
{
	int			count = idem_text_array(array, "topics", topics);

	return sort_topics(*topics, count);
}

/*
 * The topics that have pending messages, as from sort_topics().
 *
 * Jumps from topic to topic, backwards, because a topic's oldest index
 * entries are those of acknowledged messages until the next vacuum.
 */
static int
list_topics(Taking *taking, Datum **topics)
{
	static const IdemRelationId indexes[] = {
		IDEM_OUTBOX_DUE, IDEM_OUTBOX_LANES
	};
	int			size = 16;
	int			n = 0;

	*topics = palloc_array(Datum, size);
	for (int i = 0; i < lengthof(indexes); i++)
	{
		IdemScan	scan;
		ScanKeyData key;

		ScanKeyEntryInitialize(&key, SK_ISNULL | SK_SEARCHNOTNULL, DUE_TOPIC,
							   InvalidStrategy, InvalidOid, InvalidOid,
							   InvalidOid, (Datum) 0);
		idem_scan_begin(&scan, &taking->outbox, indexes[i], taking->snapshot,
						1);
		for (;;)
		{
			Datum		topic;

			CHECK_FOR_INTERRUPTS();
			idem_scan_restart(&scan, &key);
			if (!idem_scan_next(&scan, BackwardScanDirection))
				break;
			topic = datumCopy(taking->outbox.row->tts_values[OUTBOX_TOPIC],
							  false, -1);
			ScanKeyEntryInitialize(&key, 0, DUE_TOPIC, BTLessStrategyNumber,
								   InvalidOid, C_COLLATION_OID, F_TEXT_LT,
								   topic);

			if (n == size)
			{
				size *= 2;
				*topics = repalloc_array(*topics, Datum, size);
			}
			(*topics)[n++] = topic;
		}
		idem_scan_end(&scan);
	}
	return sort_topics(*topics, n);
}

/*
 * Leave each of these topics in the array once: what a call has taken, its
 * scans must not meet again.  Returns their number.
 */
static int
sort_topics(Datum *topics, int count)
{
	int			n = 0;

	qsort_interruptible(topics, count, sizeof(Datum), compare_topics, NULL);
	for (int i = 0; i < count; i++)
	{
		if (n == 0 || idem_text_compare(topics[n - 1], topics[i]) != 0)
			topics[n++] = topics[i];
	}
	return n;
}

static int
compare_topics(const void *a, const void *b, void *arg)
{
	return idem_text_compare(*(const Datum *) a, *(const Datum *) b);
}

/*
 * Take from some topics, beginning with one at random, so that each gets its
 * turn.
 */
static void
take_topics(Taking *taking, const Datum *topics, int count)
{
	int			start = 0;

	if (count > 0)
		start = pg_prng_uint64_range(&pg_global_prng_state, 0, count - 1);
	for (int i = 0; i < count && taking->wanted > 0; i++)
	{
		CHECK_FOR_INTERRUPTS();
		take_topic(taking, topics[(start + i) % count]);
	}
}

/*
 * Take from one topic, from both of its indexes; which goes first changes at
 * random, so that neither kind of message starves the other.
 */
static void
take_topic(Taking *taking, Datum topic)
{
	int64		from = (int64) pg_prng_uint64(&pg_global_prng_state);
	bool		due_first = pg_prng_bool(&pg_global_prng_state);

	if (due_first)
		take_due(taking, topic);
	take_lanes(taking, topic, from, false);
	take_lanes(taking, topic, from, true);
	if (!due_first)
		take_due(taking, topic);
}

/*
 * Take messages without a key, those first that have been available longest.
 */
static void
take_due(Taking *taking, Datum topic)
{
	IdemScan	scan;
	ScanKeyData keys[2];

	if (taking->wanted == 0)
		return;

	ScanKeyEntryInitialize(&keys[0], 0, DUE_TOPIC, BTEqualStrategyNumber,
						   InvalidOid, C_COLLATION_OID, F_TEXTEQ, topic);
	ScanKeyEntryInitialize(&keys[1], 0, DUE_AVAILABLE_AT,
						   BTLessEqualStrategyNumber, InvalidOid, InvalidOid,
						   F_TIMESTAMPTZ_LE, TimestampTzGetDatum(taking->now));
	idem_scan_begin(&scan, &taking->outbox, IDEM_OUTBOX_DUE, taking->snapshot,
					2);
	idem_scan_restart(&scan, keys);
	while (taking->wanted > 0 && idem_scan_next(&scan, ForwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		(void) take_row(taking);
	}
	idem_scan_end(&scan);
}

/*
 * Take messages with a key, from the lane "from" to the last one, or, if
 * "below", from the first one to that before "from".
 */
static void
take_lanes(Taking *taking, Datum topic, int64 from, bool below)
{
	IdemScan	scan;
	ScanKeyData keys[3];
	int64		current = 0;
	int64		passed = PG_INT64_MIN;

	if (taking->wanted == 0)
		return;

	ScanKeyEntryInitialize(&keys[0], 0, LANES_TOPIC, BTEqualStrategyNumber,
						   InvalidOid, C_COLLATION_OID, F_TEXTEQ, topic);
	ScanKeyEntryInitialize(&keys[1], 0, LANES_LANE,
						   below ? BTLessStrategyNumber :
						   BTGreaterEqualStrategyNumber,
						   InvalidOid, InvalidOid,
						   below ? F_INT8LT : F_INT8GE, Int64GetDatum(from));
	ScanKeyEntryInitialize(&keys[2], 0, LANES_LANE,
						   BTGreaterEqualStrategyNumber, InvalidOid,
						   InvalidOid, F_INT8GE, Int64GetDatum(PG_INT64_MIN));
	idem_scan_begin(&scan, &taking->outbox, IDEM_OUTBOX_LANES,
					taking->snapshot, 3);
	idem_scan_restart(&scan, keys);
	while (taking->wanted > 0 && idem_scan_next(&scan, ForwardScanDirection))
	{
		Datum	   *found = taking->outbox.row->tts_values;
		int64		lane = DatumGetInt64(found[OUTBOX_LANE]);
		int64		id = DatumGetInt64(found[OUTBOX_ID]);
		int			attempts = idem_outbox_attempts(found);

		CHECK_FOR_INTERRUPTS();
		if (lane != current)
			passed = PG_INT64_MIN;
		current = lane;

		/*
		 * This is the head of a lane, or the next one after messages that
		 * have been taken or have died.  If it is not available, the rest of
		 * the lane has to wait, and likewise if it keeps failing.
		 */
		if (is_overtaken(taking, passed) || !take_row(taking) ||
			(attempts >= Max(idem_outbox_max_attempts / 2, 1) &&
			 attempts < idem_outbox_max_attempts))
		{
			ScanKeyEntryInitialize(&keys[2], 0, LANES_LANE,
								   BTGreaterStrategyNumber, InvalidOid,
								   InvalidOid, F_INT8GT, Int64GetDatum(lane));
			idem_scan_restart(&scan, keys);
		}
		passed = id;
	}
	idem_scan_end(&scan);
}

/*
 * Has a message come to stand before the one that was found, in its lane, that
 * the transaction's snapshot does not see?  "passed" is the id of the last one
 * of the lane that it does see.
 */
static bool
is_overtaken(Taking *taking, int64 passed)
{
	Datum	   *found = taking->outbox.row->tts_values;
	IdemScan	scan;
	ScanKeyData keys[4];
	bool		overtaken;

	if (taking->newer_snapshot == NULL)
		return false;

	ScanKeyEntryInitialize(&keys[0], 0, LANES_TOPIC, BTEqualStrategyNumber,
						   InvalidOid, C_COLLATION_OID, F_TEXTEQ,
						   found[OUTBOX_TOPIC]);
	ScanKeyEntryInitialize(&keys[1], 0, LANES_LANE, BTEqualStrategyNumber,
						   InvalidOid, InvalidOid, F_INT8EQ,
						   found[OUTBOX_LANE]);
	ScanKeyEntryInitialize(&keys[2], 0, LANES_ID, BTGreaterStrategyNumber,
						   InvalidOid, InvalidOid, F_INT8GT,
						   Int64GetDatum(passed));
	ScanKeyEntryInitialize(&keys[3], 0, LANES_ID, BTLessStrategyNumber,
						   InvalidOid, InvalidOid, F_INT8LT,
						   found[OUTBOX_ID]);
	idem_scan_begin(&scan, &taking->newer, IDEM_OUTBOX_LANES,
					taking->newer_snapshot, lengthof(keys));
	idem_scan_restart(&scan, keys);
	overtaken = idem_scan_next(&scan, ForwardScanDirection);
	idem_scan_end(&scan);
	return overtaken;
}

/*
 * Take the row that was found, if it is available and nobody else is at it,
 * and add it to the result.  One whose last attempt ended without a word from
 * its relay is declared dead instead.
 *
 * Returns false if the row stays as it is.
 */
static bool
take_row(Taking *taking)
{
	IdemTable  *outbox = &taking->outbox;
	Datum	   *found = outbox->row->tts_values;
	int			attempt = DatumGetInt32(found[OUTBOX_ATTEMPT]);
	IdemOutboxRow row;
	Datum		values[lengthof(take_columns)];
	bool		nulls[lengthof(take_columns)];

	if (DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > taking->now)
		return false;

	idem_outbox_copy(outbox, &row);
	if (idem_outbox_attempts(found) >= idem_outbox_max_attempts ||
		attempt == PG_INT32_MAX)
	{
		idem_outbox_set(&row, OUTBOX_STATE, CStringGetTextDatum("dead"));
		if (row.nulls[OUTBOX_LAST_ERROR])
			idem_outbox_set(&row, OUTBOX_LAST_ERROR,
							CStringGetTextDatum("The last lease ran out."));
		if (idem_update(outbox, row.values, row.nulls,
						false) != IDEM_WRITE_DONE)
			return false;
		idem_count(IDEM_COUNT_DEAD, 1);
		return true;
	}

	idem_outbox_set(&row, OUTBOX_ATTEMPT, Int32GetDatum(attempt + 1));
	idem_outbox_set(&row, OUTBOX_LEASED, BoolGetDatum(true));
	idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
					TimestampTzGetDatum(taking->lease_expires_at));
	if (idem_update(outbox, row.values, row.nulls, false) != IDEM_WRITE_DONE)
		return false;

	IDEM_INJECTION_POINT("idem-taken");
	for (int i = 0; i < lengthof(take_columns); i++)
	{
		values[i] = row.values[take_columns[i]];
		nulls[i] = row.nulls[take_columns[i]];
	}
	tuplestore_putvalues(taking->result->setResult, taking->result->setDesc,
						 values, nulls);
	taking->wanted--;
	idem_count(IDEM_COUNT_TAKEN, 1);
	return true;
}
