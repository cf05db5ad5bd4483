/*-------------------------------------------------------------------------
 *
 * publish.c
 *		Publishing messages, one or many at once.
 *
 * A message is a row, so it exists if and only if its transaction commits.
 * Publishing looks nothing up and waits for no other transaction.  Ids come
 * from a sequence, so messages with the same key are in the order in which
 * they were published, or given in one call.
 *
 * If there are many, those that fill a page are written together.  Only the
 * first one of each lane (see lanes.c) can be ready: the others follow it,
 * and are committed or rolled back with it.
 *
 * A message is available from the time at which it is written.  The clock is
 * read before the lane is checked and before compression and TOAST, because
 * the heap writes those together with the row.  If they take long, takes no
 * longer look at that time, so the message gets a later time; see catch_up().
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/xact.h"
#include "common/sha2.h"
#include "libpq/pqformat.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/uuid.h"

#include "outbox/due_low_water.h"
#include "outbox/lanes.h"
#include "outbox/outbox_row.h"
#include "stats/stats.h"
#include "store/pg_sequence.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/arrays.h"
#include "util/client_text.h"
#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/random.h"
#include "util/settings.h"
#include "util/sha256.h"
#include "util/times.h"

/* The array arguments of idem_publish_many(), in order. */
enum
{
	TOPICS,
	PAYLOADS,
	MESSAGE_KEYS,
	HEADERS,
	NUM_ARRAYS,
};

/*
 * A lane for which idem_publish_many() has a message, and the first of these.
 */
typedef struct LaneEntry
{
	int64		lane;
	int64		id;
	bool		parked;
} LaneEntry;

/* The ready messages that idem_publish_many() inserts together. */
typedef struct Batch
{
	int64		ids[IDEM_APPEND_ROWS];
	int			nids;
	TimestampTz available_at;	/* of the first one */
} Batch;

static HTAB *make_lane_table(void);
static bool begins_lane(HTAB *lanes, IdemCursor *outbox,
						const IdemOutboxRow *row);
static void add_to_batch(Batch *batch, const IdemOutboxRow *row);
static void end_batch(Batch *batch, IdemCursor *outbox);
static void catch_up(IdemCursor *outbox, int64 id, TimestampTz available_at);
static void look_at_lanes_again(HTAB *lanes, IdemCursor *outbox);
static void make_message(IdemOutboxRow *row);
static void number_message(IdemOutboxRow *row, const Interval *deliver_after);
static int64 lane_of(Datum topic, Datum message_key);
static void append_counted(StringInfo string, Datum value);
static Datum random_uuid(void);

/*
 * idem_publish(topic, payload, message_key, headers, deliver_after) -> uuid
 */
PG_FUNCTION_INFO_V1(idem_publish);
Datum
idem_publish(PG_FUNCTION_ARGS)
{
	IdemOutboxRow row;
	Interval   *deliver_after;
	IdemCursor	outbox;

	memset(row.nulls, true, sizeof(row.nulls));
	idem_outbox_set(&row, OUTBOX_TOPIC, idem_name_arg(fcinfo, 0, "topic"));
	idem_outbox_set(&row, OUTBOX_PAYLOAD,
					idem_required_arg(fcinfo, 1, "payload"));
	if (!PG_ARGISNULL(2))
		idem_outbox_set(&row, OUTBOX_MESSAGE_KEY,
						idem_name_arg(fcinfo, 2, "message_key"));
	if (!PG_ARGISNULL(3))
		idem_outbox_set(&row, OUTBOX_HEADERS, PG_GETARG_DATUM(3));
	deliver_after = idem_interval_arg(fcinfo, 4, "deliver_after");
	make_message(&row);

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	number_message(&row, deliver_after);
	idem_lane_append(&outbox, &row);
	if (DatumGetBool(row.values[OUTBOX_IN_DUE_INDEX]))
		catch_up(&outbox, DatumGetInt64(row.values[OUTBOX_ID]),
				 DatumGetTimestampTz(row.values[OUTBOX_AVAILABLE_AT]));
	idem_cursor_close(&outbox);
	idem_log_message_event(IDEM_EVENT_PUBLISHED, row.values);
	idem_count(IDEM_COUNT_PUBLISHED, 1);
	PG_RETURN_DATUM(row.values[OUTBOX_MESSAGE_ID]);
}

/*
 * idem_publish_many(topics, payloads, message_keys, headers, deliver_after)
 *	-> setof row
 */
PG_FUNCTION_INFO_V1(idem_publish_many);
Datum
idem_publish_many(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemArray	arrays[NUM_ARRAYS];
	Interval   *deliver_after;
	IdemElement element;
	IdemCursor	outbox;
	IdemAppender appender;
	Batch		batch;
	HTAB	   *lanes;
	MemoryContext context;
	MemoryContext old;
	TimestampTz due = DT_NOEND;
	int			count;

	idem_array_arg(fcinfo, 0, "topics",
				   IDEM_ARRAY_REQUIRED | IDEM_ARRAY_NAMES, &arrays[TOPICS]);
	idem_array_arg(fcinfo, 1, "payloads", IDEM_ARRAY_REQUIRED,
				   &arrays[PAYLOADS]);
	idem_array_arg(fcinfo, 2, "message_keys", IDEM_ARRAY_NAMES,
				   &arrays[MESSAGE_KEYS]);
	idem_array_arg(fcinfo, 3, "headers", 0, &arrays[HEADERS]);
	deliver_after = idem_interval_arg(fcinfo, 4, "deliver_after");
	count = idem_array_count(arrays, NUM_ARRAYS);
	InitMaterializedSRF(fcinfo, 0);

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	idem_append_begin(&appender, &outbox);
	batch.nids = 0;
	batch.available_at = DT_NOEND;
	lanes = make_lane_table();
	context = AllocSetContextCreate(CurrentMemoryContext, "idempotency message",
									ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(context);
	idem_element_begin(&element);
	for (int i = 0; i < count; i++)
	{
		IdemOutboxRow row;
		Datum		values[2];
		bool		nulls[2] = {0};

		CHECK_FOR_INTERRUPTS();
		MemoryContextReset(context);
		element.index = i;
		memset(row.nulls, true, sizeof(row.nulls));
		idem_outbox_set(&row, OUTBOX_TOPIC,
						idem_array_value(&arrays[TOPICS], i));
		idem_outbox_set(&row, OUTBOX_PAYLOAD,
						idem_array_value(&arrays[PAYLOADS], i));
		if (!idem_array_is_null(&arrays[MESSAGE_KEYS], i))
			idem_outbox_set(&row, OUTBOX_MESSAGE_KEY,
							idem_array_value(&arrays[MESSAGE_KEYS], i));
		if (!idem_array_is_null(&arrays[HEADERS], i))
			idem_outbox_set(&row, OUTBOX_HEADERS,
							idem_array_value(&arrays[HEADERS], i));
		make_message(&row);
		number_message(&row, deliver_after);
		idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX,
						BoolGetDatum(row.nulls[OUTBOX_KEY_HASH] ||
									 begins_lane(lanes, &outbox, &row)));
		add_to_batch(&batch, &row);
		idem_append_add(&appender, row.values, row.nulls);
		if (appender.nrows == 0)
			end_batch(&batch, &outbox);
		if (i == 0)
			due = DatumGetTimestampTz(row.values[OUTBOX_AVAILABLE_AT]);

		values[0] = Int32GetDatum(i + 1);
		values[1] = row.values[OUTBOX_MESSAGE_ID];
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values,
							 nulls);
		idem_log_message_event(IDEM_EVENT_PUBLISHED, row.values);
	}
	idem_element_end(&element);
	MemoryContextSwitchTo(old);
	MemoryContextDelete(context);
	idem_append_end(&appender);
	end_batch(&batch, &outbox);
	for (int i = 0; i < Min(count, arrays[TOPICS].length); i++)
	{
		CHECK_FOR_INTERRUPTS();
		idem_notify_message(arrays[TOPICS].values[i], due, false);
	}
	look_at_lanes_again(lanes, &outbox);
	hash_destroy(lanes);
	idem_cursor_close(&outbox);
	idem_count(IDEM_COUNT_PUBLISHED, count);
	return (Datum) 0;
}

static HTAB *
make_lane_table(void)
{
	HASHCTL		control;

	control.keysize = sizeof(int64);
	control.entrysize = sizeof(LaneEntry);
	control.hcxt = CurrentMemoryContext;
	return hash_create("idempotency lanes", 64, &control,
					   HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
}

/*
 * Is a new message the first of its lane, or can it become the first,
 * depending on other transactions?  If not, it must be parked.
 */
static bool
begins_lane(HTAB *lanes, IdemCursor *outbox, const IdemOutboxRow *row)
{
	int64		lane = DatumGetInt64(row->values[OUTBOX_KEY_HASH]);
	LaneEntry  *entry;
	bool		found;

	entry = hash_search(lanes, &lane, HASH_ENTER, &found);
	if (found)
		return false;
	entry->id = DatumGetInt64(row->values[OUTBOX_ID]);
	entry->parked = idem_lane_is_blocked(outbox, lane, entry->id);
	return !entry->parked;
}

/*
 * Note a message that is going to be inserted with the batch.
 */
static void
add_to_batch(Batch *batch, const IdemOutboxRow *row)
{
	if (!DatumGetBool(row->values[OUTBOX_IN_DUE_INDEX]))
		return;
	if (batch->nids == 0)
		batch->available_at =
			DatumGetTimestampTz(row->values[OUTBOX_AVAILABLE_AT]);
	batch->ids[batch->nids++] = DatumGetInt64(row->values[OUTBOX_ID]);
}

/*
 * Called when the messages of the batch are in the table.
 */
static void
end_batch(Batch *batch, IdemCursor *outbox)
{
	for (int i = 0; i < batch->nids; i++)
		catch_up(outbox, batch->ids[i], batch->available_at);
	batch->nids = 0;
}

/*
 * Called after writing a ready message that is available from that time on.
 * If that is so long ago that takes might not look there any more (see
 * due_low_water.c), make it available from now on.
 */
static void
catch_up(IdemCursor *outbox, int64 id, TimestampTz available_at)
{
	while (available_at < GetCurrentTimestamp() - IDEM_PUBLISHING_US)
	{
		Datum		key = Int64GetDatum(id);

		CHECK_FOR_INTERRUPTS();
		CommandCounterIncrement();
		available_at = GetCurrentTimestamp();
		if (!idem_find_latest(outbox, &key, NULL) ||
			!idem_outbox_set_ready(outbox, true, DT_NOBEGIN))
			elog(ERROR, "message " INT64_FORMAT " has vanished", id);
	}
}

/*
 * Called after inserting the messages: check again the lanes of those that
 * were parked behind other transactions' messages, as lanes.c requires.
 */
static void
look_at_lanes_again(HTAB *lanes, IdemCursor *outbox)
{
	HASH_SEQ_STATUS status;
	LaneEntry  *entry;

	hash_seq_init(&status, lanes);
	while ((entry = hash_seq_search(&status)) != NULL)
	{
		if (entry->parked)
			idem_lane_recheck(outbox, entry->lane, entry->id);
	}
}

/*
 * Complete a new message that has a topic, a payload, and perhaps a key and
 * headers, except for what number_message() adds.  Raises 22P05, 22021 or
 * 54000 for a message that no relay could receive: it would block all
 * messages that are taken together with it, and no attempt would count.
 */
static void
make_message(IdemOutboxRow *row)
{
	Size		size = toast_raw_datum_size(row->values[OUTBOX_PAYLOAD]);
	int64		limit;

	if (!row->nulls[OUTBOX_HEADERS])
		size += toast_raw_datum_size(row->values[OUTBOX_HEADERS]);
	limit = idem_json_text_limit(size, idem_max_message_size);
	if (limit != 0 && idem_outbox_text_size(row, limit) > limit)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("message is too large"),
				 errdetail("Its payload and headers have more than " INT64_FORMAT " bytes of text.",
						   limit),
				 errhint("Publish a reference to the data, or let a superuser raise \"%s\" if that is the limit.",
						 "idempotency.max_message_size")));
	(void) idem_check_client_text(row->values[OUTBOX_TOPIC]);
	(void) idem_check_client_json(row->values[OUTBOX_PAYLOAD]);
	if (!row->nulls[OUTBOX_HEADERS])
		(void) idem_check_client_json(row->values[OUTBOX_HEADERS]);
	if (!row->nulls[OUTBOX_MESSAGE_KEY])
	{
		int64		lane = lane_of(row->values[OUTBOX_TOPIC],
								   idem_check_client_text(row->values[OUTBOX_MESSAGE_KEY]));

		idem_outbox_set(row, OUTBOX_KEY_HASH, Int64GetDatum(lane));
	}
	idem_outbox_set(row, OUTBOX_ATTEMPT, Int32GetDatum(0));
	idem_outbox_set(row, OUTBOX_UNCOUNTED_ATTEMPTS, Int32GetDatum(0));
	idem_outbox_set(row, OUTBOX_STATE, CStringGetTextDatum("pending"));
	idem_outbox_set(row, OUTBOX_MESSAGE_ID, random_uuid());
}

/*
 * Give a message its id and its times.  The outbox is open already, so the
 * times are from after the wait for its lock.  Before the id is drawn, the
 * transaction gets its own id; see lane_low_water.c.
 */
static void
number_message(IdemOutboxRow *row, const Interval *deliver_after)
{
	int64		id;
	TimestampTz now;

	(void) GetTopTransactionId();
	id = idem_sequence_next(IDEM_OUTBOX_IDS);
	idem_outbox_set(row, OUTBOX_ID, Int64GetDatum(id));
	IDEM_INJECTION_POINT("idem-publish-numbered");
	now = GetCurrentTimestamp();
	idem_outbox_set(row, OUTBOX_CREATED_AT, TimestampTzGetDatum(now));
	idem_outbox_set(row, OUTBOX_AVAILABLE_AT,
					TimestampTzGetDatum(idem_add_interval(now, deliver_after,
														  0)));
}

/*
 * Return the lane of a topic's messages with one key: the first eight bytes
 * of the SHA-256 of the two, each preceded by its length in four bytes, in
 * network byte order.  So a user who chooses keys cannot find one for another
 * key's lane.
 */
static int64
lane_of(Datum topic, Datum message_key)
{
	StringInfoData string;
	uint8		digest[PG_SHA256_DIGEST_LENGTH];
	uint64		lane;

	initStringInfo(&string);
	append_counted(&string, topic);
	append_counted(&string, message_key);
	idem_sha256(string.data, string.len, digest);
	memcpy(&lane, digest, sizeof(lane));
	return (int64) pg_ntoh64(lane);
}

/*
 * Append a text and its length, in UTF-8, because a dump can be restored into
 * a database with another encoding.  SQL_ASCII text is taken unchanged.
 */
static void
append_counted(StringInfo string, Datum value)
{
	text	   *name = DatumGetTextPP(value);
	char	   *bytes = VARDATA_ANY(name);
	int			length = VARSIZE_ANY_EXHDR(name);

	if (GetDatabaseEncoding() != PG_SQL_ASCII)
	{
		char	   *utf8 = pg_server_to_any(bytes, length, PG_UTF8);

		if (utf8 != bytes)
			length = strlen(utf8);
		bytes = utf8;
	}
	pq_sendint32(string, length);
	appendBinaryStringInfo(string, bytes, length);
}

/*
 * A random UUID, version 4 (RFC 9562).
 */
static Datum
random_uuid(void)
{
	pg_uuid_t  *uuid = palloc(sizeof(pg_uuid_t));

	idem_random_bytes(uuid->data, UUID_LEN);
	uuid->data[6] = (uuid->data[6] & 0x0f) | 0x40;
	uuid->data[8] = (uuid->data[8] & 0x3f) | 0x80;
	return UUIDPGetDatum(uuid);
}
