/*-------------------------------------------------------------------------
 *
 * outbox.c
 *		The transactional outbox: publish, take, acknowledge.
 *
 * A row of idem_outbox is a message.  Its state is "pending" until a relay
 * acknowledges it ("acked") or it has failed too often ("dead").
 *
 *				   take				   ack
 *		publish ------->  leased  ------------>  acked
 *		   |			  |	   |
 *		   v   lease over |	   | nack, or lease over, after the last attempt
 *		pending <---------'	   `---------------------->  dead
 *		   ^  nack, after a pause						   |
 *		   `-----------------------------------------------' requeue
 *
 * "Leased" is not a state of its own: a pending message is available from
 * available_at on, which taking it moves to the end of the lease, and nack to
 * the end of the pause.
 *
 * Order.  Messages with a key belong to a lane, a hash of topic and key, and
 * leave it in order of their ids.  A relay that takes from a lane begins with
 * the oldest pending message, the head, and goes on only as long as each next
 * one is available, so a head that is leased, pausing or delayed holds the
 * lane up.  Two relays cannot take from one lane at once: both would begin by
 * writing the head, by compare and swap, and the later one gives the lane up.
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
#include "access/xact.h"
#include "catalog/pg_collation_d.h"
#include "catalog/pg_type_d.h"
#include "commands/sequence.h"
#include "common/hashfn.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/jsonb.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "compat.h"
#include "idempotency.h"
#include "settings.h"
#include "stats.h"
#include "store.h"

/* The columns of idem_outbox, in order. */
enum
{
	OUTBOX_ID,
	OUTBOX_LANE,
	OUTBOX_CREATED_AT,
	OUTBOX_AVAILABLE_AT,
	OUTBOX_ACKED_AT,
	OUTBOX_ATTEMPT,
	OUTBOX_MESSAGE_ID,
	OUTBOX_STATE,
	OUTBOX_TOPIC,
	OUTBOX_MESSAGE_KEY,
	OUTBOX_PAYLOAD,
	OUTBOX_HEADERS,
	OUTBOX_LAST_ERROR,
	OUTBOX_NUM_COLUMNS,
};

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

/* A pause after a failure: 1 s, doubled each time up to an hour. */
#define BACKOFF_FIRST_MS	1000.0
#define BACKOFF_MAX_MS		(3600 * 1000.0)

/* A message's row, and a new version of it. */
typedef struct OutboxRow
{
	Datum		values[OUTBOX_NUM_COLUMNS];
	bool		nulls[OUTBOX_NUM_COLUMNS];
} OutboxRow;

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

static int64 lane_of(Datum topic, Datum message_key);
static Datum random_uuid(void);
static int	topics_arg(Datum array, Datum **topics);
static bool contains(const Datum *topics, int n, Datum topic);
static int	list_topics(Taking *taking, Datum **topics);
static void take_topic(Taking *taking, Datum topic);
static void take_due(Taking *taking, Datum topic);
static void take_lanes(Taking *taking, Datum topic, int64 from, bool below);
static bool take_row(Taking *taking);
static bool acknowledge(IdemTable *outbox, int64 id);
static bool requeue(IdemTable *outbox, int64 id);
static int	requeue_all(IdemTable *outbox);
static int	ids_arg(Datum array, int64 **ids);
static int	compare_ids(const void *a, const void *b);
static bool find_message(IdemTable *outbox, int64 id);
static bool in_state(IdemTable *outbox, const char *state);
static void copy_row(IdemTable *outbox, OutboxRow *row);
static void set_column(OutboxRow *row, int column, Datum value);
static double backoff_ms(int attempt);

/*
 * idem_publish(topic, payload, message_key, headers, deliver_after) -> uuid
 */
PG_FUNCTION_INFO_V1(idem_publish);
Datum
idem_publish(PG_FUNCTION_ARGS)
{
	OutboxRow	row;
	TimestampTz now = GetCurrentTimestamp();
	IdemTable	outbox;

	memset(row.nulls, true, sizeof(row.nulls));
	set_column(&row, OUTBOX_TOPIC, idem_name_arg(fcinfo, 0, "topic"));
	set_column(&row, OUTBOX_PAYLOAD,
			   idem_required_arg(fcinfo, 1, "payload"));
	if (!PG_ARGISNULL(2))
	{
		set_column(&row, OUTBOX_MESSAGE_KEY,
				   idem_name_arg(fcinfo, 2, "message_key"));
		set_column(&row, OUTBOX_LANE,
				   Int64GetDatum(lane_of(row.values[OUTBOX_TOPIC],
										 row.values[OUTBOX_MESSAGE_KEY])));
	}
	if (!PG_ARGISNULL(3))
		set_column(&row, OUTBOX_HEADERS, PG_GETARG_DATUM(3));
	set_column(&row, OUTBOX_AVAILABLE_AT,
			   TimestampTzGetDatum(idem_add_interval(now,
													 idem_interval_arg(fcinfo, 4, "deliver_after"),
													 0)));
	set_column(&row, OUTBOX_CREATED_AT, TimestampTzGetDatum(now));
	set_column(&row, OUTBOX_ATTEMPT, Int32GetDatum(0));
	set_column(&row, OUTBOX_STATE, CStringGetTextDatum("pending"));
	set_column(&row, OUTBOX_MESSAGE_ID, random_uuid());

	idem_table_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	set_column(&row, OUTBOX_ID,
			   Int64GetDatum(nextval_internal(idem_relation_oid(IDEM_OUTBOX_IDS),
											  false)));
	idem_append(&outbox, row.values, row.nulls);
	idem_table_close(&outbox);
	idem_count(IDEM_COUNT_PUBLISHED, 1);
	PG_RETURN_DATUM(row.values[OUTBOX_MESSAGE_ID]);
}

/*
 * The lane of a topic's messages with one key.
 */
static int64
lane_of(Datum topic, Datum message_key)
{
	text	   *t = DatumGetTextPP(topic);
	text	   *k = DatumGetTextPP(message_key);
	uint64		seed;

	seed = hash_bytes_extended((unsigned char *) VARDATA_ANY(t),
							   VARSIZE_ANY_EXHDR(t), 0);
	return (int64) hash_bytes_extended((unsigned char *) VARDATA_ANY(k),
									   VARSIZE_ANY_EXHDR(k), seed);
}

/*
 * A random UUID, version 4 (RFC 9562).
 */
static Datum
random_uuid(void)
{
	pg_uuid_t  *uuid = palloc(sizeof(pg_uuid_t));

	if (!pg_strong_random(uuid->data, UUID_LEN))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate random values")));
	uuid->data[6] = (uuid->data[6] & 0x0f) | 0x40;
	uuid->data[8] = (uuid->data[8] & 0x3f) | 0x80;
	return UUIDPGetDatum(uuid);
}

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
		 * the lane has to wait.  If it has failed before, it goes alone, or it
		 * would use up the attempts of those behind it.
		 */
		if (!take_row(taking) ||
			(attempt > 0 && attempt < idem_outbox_max_attempts))
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
	OutboxRow	row;
	Datum		values[lengthof(take_columns)];
	bool		nulls[lengthof(take_columns)];

	if (DatumGetTimestampTz(found[OUTBOX_AVAILABLE_AT]) > taking->now)
		return false;

	copy_row(outbox, &row);
	if (attempt >= idem_outbox_max_attempts)
	{
		set_column(&row, OUTBOX_STATE, CStringGetTextDatum("dead"));
		if (row.nulls[OUTBOX_LAST_ERROR])
			set_column(&row, OUTBOX_LAST_ERROR,
					   CStringGetTextDatum("The last lease ran out."));
		if (idem_update(outbox, row.values, row.nulls,
						false) != IDEM_WRITE_DONE)
			return false;
		idem_count(IDEM_COUNT_DEAD, 1);
		return true;
	}

	set_column(&row, OUTBOX_ATTEMPT, Int32GetDatum(attempt + 1));
	set_column(&row, OUTBOX_AVAILABLE_AT,
			   TimestampTzGetDatum(taking->lease_expires_at));
	if (idem_update(outbox, row.values, row.nulls, false) != IDEM_WRITE_DONE)
		return false;

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

/*
 * idem_outbox_ack(ids) -> int
 */
PG_FUNCTION_INFO_V1(idem_outbox_ack);
Datum
idem_outbox_ack(PG_FUNCTION_ARGS)
{
	IdemTable	outbox;
	int64	   *ids;
	int			nids;
	int			acked = 0;

	nids = ids_arg(idem_required_arg(fcinfo, 0, "ids"), &ids);
	idem_table_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	for (int i = 0; i < nids; i++)
	{
		if (acknowledge(&outbox, ids[i]))
			acked++;
	}
	idem_table_close(&outbox);
	idem_count(IDEM_COUNT_ACKED, acked);
	PG_RETURN_INT32(acked);
}

/*
 * Acknowledge a message.  A dead one counts: it got through after all.
 * Returns whether there was something to acknowledge.
 */
static bool
acknowledge(IdemTable *outbox, int64 id)
{
	OutboxRow	row;

	do
	{
		CHECK_FOR_INTERRUPTS();
		if (!find_message(outbox, id) || in_state(outbox, "acked"))
			return false;
		copy_row(outbox, &row);
		set_column(&row, OUTBOX_STATE, CStringGetTextDatum("acked"));
		set_column(&row, OUTBOX_ACKED_AT,
				   TimestampTzGetDatum(GetCurrentTimestamp()));
	} while (idem_update(outbox, row.values, row.nulls,
						 true) == IDEM_WRITE_STALE);
	return true;
}

/*
 * idem_outbox_nack(id, error, retry_after, attempt) -> text
 */
PG_FUNCTION_INFO_V1(idem_outbox_nack);
Datum
idem_outbox_nack(PG_FUNCTION_ARGS)
{
	int64		id = DatumGetInt64(idem_required_arg(fcinfo, 0, "id"));
	Interval   *retry_after = idem_interval_arg(fcinfo, 2, "retry_after");
	IdemTable	outbox;
	const char *state;

	idem_table_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	for (;;)
	{
		OutboxRow	row;
		TimestampTz available_at;
		int			attempt;

		CHECK_FOR_INTERRUPTS();
		state = "lost";
		if (!find_message(&outbox, id) || in_state(&outbox, "acked"))
			break;
		copy_row(&outbox, &row);
		attempt = DatumGetInt32(row.values[OUTBOX_ATTEMPT]);
		if (!PG_ARGISNULL(3) && PG_GETARG_INT32(3) != attempt)
			break;

		state = "dead";
		if (in_state(&outbox, "dead"))
			break;

		if (attempt < idem_outbox_max_attempts)
			state = "pending";
		available_at = idem_add_interval(GetCurrentTimestamp(), retry_after,
										 backoff_ms(attempt));
		set_column(&row, OUTBOX_STATE, CStringGetTextDatum(state));
		set_column(&row, OUTBOX_AVAILABLE_AT,
				   TimestampTzGetDatum(available_at));
		if (!PG_ARGISNULL(1))
			set_column(&row, OUTBOX_LAST_ERROR,
					   idem_clip_text(PG_GETARG_DATUM(1)));
		if (idem_update(&outbox, row.values, row.nulls,
						true) == IDEM_WRITE_STALE)
			continue;

		idem_count(IDEM_COUNT_NACKED, 1);
		if (attempt >= idem_outbox_max_attempts)
			idem_count(IDEM_COUNT_DEAD, 1);
		break;
	}
	idem_table_close(&outbox);
	PG_RETURN_TEXT_P(cstring_to_text(state));
}

/*
 * How long to pause after so many attempts: exponential, and cut by up to a
 * half at random, so that what failed together is not retried together.
 */
static double
backoff_ms(int attempt)
{
	double		pause = BACKOFF_FIRST_MS;

	for (int i = 1; i < attempt && pause < BACKOFF_MAX_MS; i++)
		pause *= 2;
	return Min(pause, BACKOFF_MAX_MS) *
		(0.5 + 0.5 * pg_prng_double(&pg_global_prng_state));
}

/*
 * idem_outbox_requeue(ids) -> int
 */
PG_FUNCTION_INFO_V1(idem_outbox_requeue);
Datum
idem_outbox_requeue(PG_FUNCTION_ARGS)
{
	IdemTable	outbox;
	int			requeued = 0;

	idem_table_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	if (PG_ARGISNULL(0))
		requeued = requeue_all(&outbox);
	else
	{
		int64	   *ids;
		int			nids = ids_arg(PG_GETARG_DATUM(0), &ids);

		for (int i = 0; i < nids; i++)
		{
			if (requeue(&outbox, ids[i]))
				requeued++;
		}
	}
	idem_table_close(&outbox);
	PG_RETURN_INT32(requeued);
}

/*
 * Put every dead message back.  Returns how many there were.
 */
static int
requeue_all(IdemTable *outbox)
{
	Snapshot	snapshot = RegisterSnapshot(GetTransactionSnapshot());
	IdemScan	scan;
	int64	   *ids;
	int			size = 64;
	int			nids = 0;
	int			requeued = 0;

	ids = palloc_array(int64, size);
	idem_scan_begin(&scan, outbox, IDEM_OUTBOX_DEAD, snapshot, 0);
	idem_scan_restart(&scan, NULL);
	while (idem_scan_next(&scan, ForwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		if (nids == size)
		{
			size *= 2;
			ids = repalloc_huge(ids, size * sizeof(int64));
		}
		ids[nids++] = DatumGetInt64(outbox->row->tts_values[OUTBOX_ID]);
	}
	idem_scan_end(&scan);
	UnregisterSnapshot(snapshot);

	for (int i = 0; i < nids; i++)
	{
		if (requeue(outbox, ids[i]))
			requeued++;
	}
	return requeued;
}

/*
 * Put a dead message back, with all its attempts.  Returns whether it was
 * dead.
 */
static bool
requeue(IdemTable *outbox, int64 id)
{
	OutboxRow	row;

	do
	{
		CHECK_FOR_INTERRUPTS();
		if (!find_message(outbox, id) || !in_state(outbox, "dead"))
			return false;
		copy_row(outbox, &row);
		set_column(&row, OUTBOX_STATE, CStringGetTextDatum("pending"));
		set_column(&row, OUTBOX_ATTEMPT, Int32GetDatum(0));
		set_column(&row, OUTBOX_AVAILABLE_AT,
				   TimestampTzGetDatum(GetCurrentTimestamp()));
	} while (idem_update(outbox, row.values, row.nulls,
						 true) == IDEM_WRITE_STALE);
	return true;
}

/*
 * The elements of an array of ids, ascending, so that two calls for the same
 * messages cannot deadlock.  Returns their number.  Raises 22004.
 */
static int
ids_arg(Datum array, int64 **ids)
{
	Datum	   *elements;
	bool	   *nulls;
	int			count;

	deconstruct_array(DatumGetArrayTypeP(array), INT8OID, sizeof(int64),
					  FLOAT8PASSBYVAL, TYPALIGN_DOUBLE,
					  &elements, &nulls, &count);
	*ids = palloc_array(int64, count);
	for (int i = 0; i < count; i++)
	{
		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("argument \"%s\" must not contain nulls",
							"ids")));
		(*ids)[i] = DatumGetInt64(elements[i]);
	}
	qsort(*ids, count, sizeof(int64), compare_ids);
	return count;
}

static int
compare_ids(const void *a, const void *b)
{
	int64		ia = *(const int64 *) a;
	int64		ib = *(const int64 *) b;

	return (ia > ib) - (ia < ib);
}

static bool
find_message(IdemTable *outbox, int64 id)
{
	Datum		key = Int64GetDatum(id);

	return idem_find_latest(outbox, &key);
}

/*
 * Is the message that was found in this state?
 */
static bool
in_state(IdemTable *outbox, const char *state)
{
	text	   *value = DatumGetTextPP(outbox->row->tts_values[OUTBOX_STATE]);

	return VARSIZE_ANY_EXHDR(value) == strlen(state) &&
		memcmp(VARDATA_ANY(value), state, strlen(state)) == 0;
}

static void
copy_row(IdemTable *outbox, OutboxRow *row)
{
	memcpy(row->values, outbox->row->tts_values, sizeof(row->values));
	memcpy(row->nulls, outbox->row->tts_isnull, sizeof(row->nulls));
}

static void
set_column(OutboxRow *row, int column, Datum value)
{
	row->values[column] = value;
	row->nulls[column] = false;
}
