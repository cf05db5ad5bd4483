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

/* A call of idem_outbox_take(). */
typedef struct Taking
{
	IdemTable	outbox;
	Snapshot	snapshot;
	TimestampTz now;
	TimestampTz lease_expires_at;
	int			wanted;			/* how many more messages */
	ReturnSetInfo *result;
} Taking;

static int	topics_arg(Datum array, Datum **topics);
static bool contains(const Datum *topics, int n, Datum topic);
static int	list_topics(Taking *taking, Datum **topics);
static void take_topic(Taking *taking, Datum topic);
static void take_due(Taking *taking, Datum topic);
static void take_lanes(Taking *taking, Datum topic, int64 from, bool below);
static bool take_row(Taking *taking);

/*
 * idem_outbox_take(max_messages, lease, topics) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_outbox_take);
Datum
idem_outbox_take(PG_FUNCTION_ARGS)
{
	Taking		taking;
	Interval   *lease;
	Datum	   *topics;
	int			ntopics;
	int			start;

	taking.wanted = DatumGetInt32(idem_required_arg(fcinfo, 0,
													"max_messages"));
	if (taking.wanted < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "max_messages")));
	(void) idem_required_arg(fcinfo, 1, "lease");
	lease = idem_interval_arg(fcinfo, 1, "lease");

	InitMaterializedSRF(fcinfo, 0);
	taking.result = (ReturnSetInfo *) fcinfo->resultinfo;
	taking.now = GetCurrentTimestamp();
	taking.lease_expires_at = idem_add_interval(taking.now, lease, 0);

	idem_table_open(&taking.outbox, IDEM_OUTBOX, RowExclusiveLock);
	taking.snapshot = RegisterSnapshot(GetTransactionSnapshot());

	ntopics = PG_ARGISNULL(2) ? list_topics(&taking, &topics) :
		topics_arg(PG_GETARG_DATUM(2), &topics);
	start = ntopics > 0 ?
		pg_prng_uint64_range(&pg_global_prng_state, 0, ntopics - 1) : 0;
	for (int i = 0; i < ntopics && taking.wanted > 0; i++)
		take_topic(&taking, topics[(start + i) % ntopics]);

	UnregisterSnapshot(taking.snapshot);
	idem_table_close(&taking.outbox);
	return (Datum) 0;
}

/*
 * The topics of an array, each of them once: what a call has taken, its scans
 * must not meet again.  Returns their number.
 */
static int
topics_arg(Datum array, Datum **topics)
{
	int			count = idem_text_array(array, "topics", topics);
	int			n = 0;

	for (int i = 0; i < count; i++)
	{
		if (!contains(*topics, n, (*topics)[i]))
			(*topics)[n++] = (*topics)[i];
	}
	return n;
}

static bool
contains(const Datum *topics, int n, Datum topic)
{
	for (int i = 0; i < n; i++)
	{
		if (idem_text_equal(topics[i], topic))
			return true;
	}
	return false;
}

/*
 * The topics that have pending messages.  Returns their number.
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
		int			known = n;

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

			if (contains(*topics, known, topic))
				continue;
			if (n == size)
			{
				size *= 2;
				*topics = repalloc_array(*topics, Datum, size);
			}
			(*topics)[n++] = topic;
		}
		idem_scan_end(&scan);
	}
	return n;
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
		Datum		lane = found[OUTBOX_LANE];
		int			attempt = DatumGetInt32(found[OUTBOX_ATTEMPT]);

		CHECK_FOR_INTERRUPTS();

		/*
		 * This is the head of a lane, or the next one after messages that
		 * have been taken or have died.  If it is not available, the rest of
		 * the lane has to wait, and likewise if it keeps failing.
		 */
		if (!take_row(taking) ||
			(attempt >= Max(idem_outbox_max_attempts / 2, 1) &&
			 attempt < idem_outbox_max_attempts))
		{
			ScanKeyEntryInitialize(&keys[2], 0, LANES_LANE,
								   BTGreaterStrategyNumber, InvalidOid,
								   InvalidOid, F_INT8GT, lane);
			idem_scan_restart(&scan, keys);
		}
	}
	idem_scan_end(&scan);
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
	IdemOutboxRow	row;
	Datum		values[lengthof(take_columns)];
	bool		nulls[lengthof(take_columns)];

	if (DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > taking->now)
		return false;

	idem_outbox_copy(outbox, &row);
	if (attempt >= idem_outbox_max_attempts)
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
