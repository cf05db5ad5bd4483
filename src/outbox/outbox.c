/*-------------------------------------------------------------------------
 *
 * outbox.c
 *		The transactional outbox: acknowledge, refuse, requeue.
 *
 * A row of idem_outbox is a message.  Its state is "pending" until a relay
 * acknowledges it ("acked") or it has failed too often ("dead").
 *
 *				   take				   ack
 *		publish ------->  leased  ------------>  acked
 *		   |			  |	   |
 *		   v   lease over |	   | nack, or lease over, after the last attempt
 *		pending <---------'	   `---------------------->  dead
 *		   ^  nack, after a pause; release			   |
 *		   `-----------------------------------------------' requeue
 *
 * "Leased" is not a separate state.  A pending message is available from
 * available_at on.  A take moves that to the end of the lease, and a nack to
 * the end of the pause.  awaiting_ack tells the two apart: it is true from a
 * take until the relay answers, false after the relay has refused the
 * message, and NULL if the message has not been taken since it was published,
 * requeued or released.
 *
 * "attempt" counts how often a message has been taken.  It distinguishes a
 * relay's lease from a later one, so it must never repeat.  Attempts are
 * taken back by raising uncounted_attempts: a requeue raises it to "attempt",
 * and the release of an untried message by one.
 *
 * All calls that answer for messages wait for the holder of a row, and then
 * look at it again.  They write without waiting, so a decision and the times
 * in it are never from before a wait.
 *
 * Messages are published in publish.c and handed out in take.c, which also
 * states their order.  Leases are extended and released in lease.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/skey.h"
#include "common/pg_prng.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "outbox/lane_low_water.h"
#include "outbox/lanes.h"
#include "outbox/outbox_row.h"
#include "stats/stats.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/settings.h"
#include "util/texts.h"
#include "util/times.h"

/* The column of idem_outbox_ended, from 1; NULL for dead messages. */
#define ENDED_ACKED_AT		1

/* The pause after a failure: 1 s, doubled each time up to an hour. */
#define BACKOFF_FIRST_MS	1000.0
#define BACKOFF_MAX_MS		(3600 * 1000.0)

/*
 * idem_outbox_fail() keeps this number of errors of a message, each of this
 * length in bytes.
 */
#define ERRORS_KEPT			5
#define ERROR_LENGTH		500

/* A message that has left its lane. */
typedef struct Departed
{
	int64		lane;
	int64		id;
	IdemOutboxRow *signpost;	/* see idem_lane_promote_next() */
} Departed;

/* A failed delivery, as idem_outbox_nack() or idem_outbox_fail() reports it. */
typedef struct Failure
{
	int64		id;
	bool		has_attempt;
	int			attempt;		/* of the relay that reports it */
	text	   *error;			/* NULL: keep the previous error */
	Interval   *retry_after;	/* or NULL */
	bool		counted;
	bool		keep_history;	/* of errors */
	bool		has_schedule;
	IdemArray	schedule;		/* pauses after the first failures */
	Interval   *max_age;		/* or NULL */
} Failure;

static bool acknowledge(IdemCursor *outbox, int64 id, Departed *departed, int *ndeparted);
static bool delete_message(IdemCursor *outbox, const IdemOutboxRow *row);
static IdemOutboxRow *make_signpost(const IdemOutboxRow *message);
static void promote_lanes(IdemCursor *outbox, Departed *departed, int count);
static int	compare_departed(const void *a, const void *b, void *arg);
static void check_schedule(const IdemArray *schedule);
static const char *refuse(const Failure *failure);
static bool is_last_failure(const Failure *failure, const IdemOutboxRow *row,
							TimestampTz now);
static TimestampTz end_of_pause(const Failure *failure,
								const IdemOutboxRow *row, TimestampTz now);
static Datum add_error(const IdemOutboxRow *row, text *error, TimestampTz now);
static bool attempt_is_over(const IdemOutboxRow *row, int attempt);
static double backoff_ms(int attempt);
static int	requeue_all(IdemCursor *outbox);
static bool requeue(IdemCursor *outbox, int64 id);
static bool find_dead(IdemCursor *outbox, int64 id);
static int	ids_arg(FunctionCallInfo fcinfo, int64 **ids);
static int	compare_ids(const void *a, const void *b, void *arg);

/*
 * idem_outbox_ack(ids) -> int
 */
PG_FUNCTION_INFO_V1(idem_outbox_ack);
Datum
idem_outbox_ack(PG_FUNCTION_ARGS)
{
	IdemCursor	outbox;
	int64	   *ids;
	int			nids;
	Departed   *departed;
	int			ndeparted = 0;
	int			acked = 0;

	nids = ids_arg(fcinfo, &ids);
	departed = MemoryContextAllocHuge(CurrentMemoryContext, nids * sizeof(Departed));
	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	for (int i = 0; i < nids; i++)
	{
		if (acknowledge(&outbox, ids[i], departed, &ndeparted))
			acked++;
	}
	promote_lanes(&outbox, departed, ndeparted);
	idem_cursor_close(&outbox);
	idem_count(IDEM_COUNT_ACKED, acked);
	PG_RETURN_INT32(acked);
}

/*
 * Acknowledge a message, or delete it if acknowledged messages are not kept.
 * A dead message is acknowledged, too: it was delivered after all.  Returns
 * whether there was something to acknowledge.  If the message has left its
 * lane, adds it to "departed".
 */
static bool
acknowledge(IdemCursor *outbox, int64 id, Departed *departed, int *ndeparted)
{
	IdemOutboxRow row;
	bool		leaves;
	bool		keep;

	do
	{
		if (!idem_outbox_find(outbox, id) ||
			idem_outbox_in_state(outbox, "acked"))
			return false;
		idem_outbox_copy(outbox, &row);
		leaves = idem_outbox_in_state(outbox, "pending");
		idem_outbox_set(&row, OUTBOX_STATE, CStringGetTextDatum("acked"));
		idem_outbox_set(&row, OUTBOX_ACKED_AT,
						TimestampTzGetDatum(GetCurrentTimestamp()));
		/* A dead one might be a signpost of its lane. */
		if (leaves)
			idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX, BoolGetDatum(false));
		keep = idem_outbox_retention > 0 ||
			(!row.nulls[OUTBOX_KEY_HASH] && DatumGetBool(row.values[OUTBOX_IN_DUE_INDEX]));
	} while (keep ? !idem_outbox_write(outbox, &row) :
			 !delete_message(outbox, &row));
	idem_log_message_event(IDEM_EVENT_RELAYED, row.values);
	if (leaves && !row.nulls[OUTBOX_KEY_HASH])
	{
		departed[*ndeparted].lane = DatumGetInt64(row.values[OUTBOX_KEY_HASH]);
		departed[*ndeparted].id = id;
		departed[*ndeparted].signpost = keep ? NULL : make_signpost(&row);
		(*ndeparted)++;
	}
	return true;
}

/*
 * Delete the message that was found; returns as idem_outbox_write() does.
 */
static bool
delete_message(IdemCursor *outbox, const IdemOutboxRow *row)
{
	IdemWrite	result = idem_delete(outbox, false);

	if (result == IDEM_WRITE_HELD)
		idem_wait(outbox);
	if (result == IDEM_WRITE_DONE)
		idem_outbox_changes(row);
	return result == IDEM_WRITE_DONE;
}

/*
 * Make the signpost that might have to replace a message that has been
 * acknowledged and deleted: the row without payload, headers and error.
 * idem_lane_promote_next() sets its time and payload.
 */
static IdemOutboxRow *
make_signpost(const IdemOutboxRow *message)
{
	static const int columns[] = {
		OUTBOX_MESSAGE_ID, OUTBOX_TOPIC, OUTBOX_MESSAGE_KEY
	};
	IdemOutboxRow *signpost = palloc(sizeof(IdemOutboxRow));

	*signpost = *message;
	for (int i = 0; i < lengthof(columns); i++)
	{
		int			typlen = columns[i] == OUTBOX_MESSAGE_ID ? UUID_LEN : -1;

		signpost->values[columns[i]] = datumCopy(message->values[columns[i]],
												 false, typlen);
	}
	idem_outbox_set(signpost, OUTBOX_IN_DUE_INDEX, BoolGetDatum(true));
	signpost->nulls[OUTBOX_HEADERS] = true;
	signpost->nulls[OUTBOX_LAST_ERROR] = true;
	return signpost;
}

/*
 * Make sure that takes find the next message of each lane that messages have
 * left.
 */
static void
promote_lanes(IdemCursor *outbox, Departed *departed, int count)
{
	qsort_interruptible(departed, count, sizeof(Departed), compare_departed, NULL);
	for (int i = 0; i < count; i++)
	{
		if (i == 0 || departed[i].lane != departed[i - 1].lane)
			idem_lane_promote_next(outbox, departed[i].lane, departed[i].id,
								   departed[i].signpost);
	}
}

static int
compare_departed(const void *a, const void *b, void *arg)
{
	const Departed *departed_a = a;
	const Departed *departed_b = b;

	if (departed_a->lane != departed_b->lane)
		return departed_a->lane > departed_b->lane ? 1 : -1;
	return compare_ids(&departed_a->id, &departed_b->id, arg);
}

/*
 * idem_outbox_nack(id, error, retry_after, attempt) -> text
 */
PG_FUNCTION_INFO_V1(idem_outbox_nack);
Datum
idem_outbox_nack(PG_FUNCTION_ARGS)
{
	Failure		failure =
	{
		.id = DatumGetInt64(idem_required_arg(fcinfo, 0, "id")),
		.has_attempt = !PG_ARGISNULL(3),
		.attempt = PG_ARGISNULL(3) ? 0 : PG_GETARG_INT32(3),
		.retry_after = idem_interval_arg(fcinfo, 2, "retry_after"),
		.counted = true
	};

	if (!PG_ARGISNULL(1))
		failure.error = PG_GETARG_TEXT_PP(1);
	PG_RETURN_TEXT_P(cstring_to_text(refuse(&failure)));
}

/*
 * idem_outbox_fail(id, attempt, error, retry_after, counted, schedule,
 * max_age) -> text
 */
PG_FUNCTION_INFO_V1(idem_outbox_fail);
Datum
idem_outbox_fail(PG_FUNCTION_ARGS)
{
	Failure		failure = {
		.id = DatumGetInt64(idem_required_arg(fcinfo, 0, "id")),
		.has_attempt = true,
		.attempt = DatumGetInt32(idem_required_arg(fcinfo, 1, "attempt")),
		.error = DatumGetTextPP(idem_required_arg(fcinfo, 2, "error")),
		.retry_after = idem_interval_arg(fcinfo, 3, "retry_after"),
		.counted = DatumGetBool(idem_required_arg(fcinfo, 4, "counted")),
		.max_age = idem_interval_arg(fcinfo, 6, "max_age"),
		.keep_history = true
	};

	if (!PG_ARGISNULL(5))
	{
		idem_array_arg(fcinfo, 5, "schedule", IDEM_ARRAY_REQUIRED,
					   &failure.schedule);
		check_schedule(&failure.schedule);
		failure.has_schedule = true;
	}
	/* Nothing has failed if the relay postpones a message. */
	if (VARSIZE_ANY_EXHDR(failure.error) == 0)
		failure.error = NULL;
	PG_RETURN_TEXT_P(cstring_to_text(refuse(&failure)));
}

/*
 * Raise 22023 if a pause of a schedule is negative or not finite.
 */
static void
check_schedule(const IdemArray *schedule)
{
	for (int i = 0; i < schedule->length; i++)
		idem_check_interval_arg(DatumGetIntervalP(schedule->values[i]),
								schedule->name);
}

/*
 * Return a message that could not be delivered to the outbox, or declare it
 * dead.  Returns its new state, or "lost" if nothing was changed.  Waits for
 * the holder of the row.
 */
static const char *
refuse(const Failure *failure)
{
	IdemCursor	outbox;
	const char *state;

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	for (;;)
	{
		IdemOutboxRow row;
		TimestampTz now;
		bool		has_lane;
		int64		lane = 0;

		state = "lost";
		if (!idem_outbox_find(&outbox, failure->id) ||
			idem_outbox_in_state(&outbox, "acked"))
			break;
		idem_outbox_copy(&outbox, &row);
		if (failure->has_attempt && attempt_is_over(&row, failure->attempt))
			break;

		state = "dead";
		if (idem_outbox_in_state(&outbox, "dead"))
			break;

		/* The relay repeats a report because it did not receive the answer. */
		state = "pending";
		if (failure->keep_history &&
			!DatumGetBool(row.values[OUTBOX_AWAITING_ACK]))
			break;

		state = "dead";
		now = GetCurrentTimestamp();
		if (!failure->counted)
			idem_outbox_set(&row, OUTBOX_UNCOUNTED_ATTEMPTS,
							Int32GetDatum(DatumGetInt32(row.values[OUTBOX_UNCOUNTED_ATTEMPTS]) + 1));
		if (!is_last_failure(failure, &row, now))
			state = "pending";
		idem_outbox_set(&row, OUTBOX_STATE, CStringGetTextDatum(state));
		idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX,
						BoolGetDatum(strcmp(state, "pending") == 0));
		idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
						TimestampTzGetDatum(end_of_pause(failure, &row, now)));
		if (!row.nulls[OUTBOX_AWAITING_ACK])
			idem_outbox_set(&row, OUTBOX_AWAITING_ACK, BoolGetDatum(false));
		if (failure->error != NULL)
			idem_outbox_set(&row, OUTBOX_LAST_ERROR,
							failure->keep_history ?
							add_error(&row, failure->error, now) :
							idem_clip_text(PointerGetDatum(failure->error)));
		has_lane = !row.nulls[OUTBOX_KEY_HASH];
		if (has_lane)
			lane = DatumGetInt64(row.values[OUTBOX_KEY_HASH]);
		if (!idem_outbox_write(&outbox, &row))
			continue;

		idem_count(IDEM_COUNT_NACKED, 1);
		idem_log_message_event(IDEM_EVENT_NACKED, row.values);
		if (strcmp(state, "dead") == 0)
		{
			idem_count(IDEM_COUNT_DEAD, 1);
			idem_log_message_event(IDEM_EVENT_DEAD, row.values);
			if (has_lane)
				idem_lane_promote_next(&outbox, lane, failure->id, NULL);
		}
		break;
	}
	idem_cursor_close(&outbox);
	return state;
}

/*
 * Does a message get no attempt after this failure?
 */
static bool
is_last_failure(const Failure *failure, const IdemOutboxRow *row, TimestampTz now)
{
	int			attempts = idem_outbox_attempts(row->values);
	TimestampTz created_at = DatumGetTimestampTz(row->values[OUTBOX_CREATED_AT]);

	if (failure->max_age != NULL &&
		idem_add_interval(created_at, failure->max_age, 0) <= now)
		return true;
	/* The next take would declare it dead. */
	if (attempts >= idem_outbox_max_attempts)
		return true;
	return failure->counted && failure->has_schedule &&
		attempts > failure->schedule.length;
}

/*
 * Return the time at which a failed message can be taken again: after its
 * pause in the schedule, but not before "retry_after".
 */
static TimestampTz
end_of_pause(const Failure *failure, const IdemOutboxRow *row, TimestampTz now)
{
	int			attempts = idem_outbox_attempts(row->values);
	TimestampTz end;
	TimestampTz scheduled = now;

	if (!failure->has_schedule || !failure->counted)
		return idem_add_interval(now, failure->retry_after,
								 backoff_ms(attempts));
	end = idem_add_interval(now, failure->retry_after, 0);
	if (attempts > 0 && attempts <= failure->schedule.length)
		scheduled = idem_add_interval(now, DatumGetIntervalP(failure->schedule.values[attempts - 1]), 0);
	return Max(end, scheduled);
}

/*
 * Return the last errors of a message, this one first.  Each is a line that
 * begins with its time.
 */
static Datum
add_error(const IdemOutboxRow *row, text *error, TimestampTz now)
{
	StringInfoData history;
	struct pg_tm tm;
	fsec_t		fsec;
	char	   *words = text_to_cstring(error);
	int			length = strlen(words);

	length = pg_mbcliplen(words, length, Min(length, ERROR_LENGTH));
	words[length] = '\0';
	for (char *c = words; *c != '\0'; c++)
	{
		if (*c == '\n' || *c == '\r')
			*c = ' ';
	}
	initStringInfo(&history);
	if (timestamp2tm(now, NULL, &tm, &fsec, NULL, NULL) == 0)
		appendStringInfo(&history, "%04d-%02d-%02dT%02d:%02d:%02dZ ",
						 tm.tm_year, tm.tm_mon, tm.tm_mday,
						 tm.tm_hour, tm.tm_min, tm.tm_sec);
	appendStringInfoString(&history, words);
	if (!row->nulls[OUTBOX_LAST_ERROR])
	{
		char	   *before = TextDatumGetCString(row->values[OUTBOX_LAST_ERROR]);
		char	   *end = before;

		for (int i = 1; i < ERRORS_KEPT && *end != '\0'; i++)
		{
			end += strcspn(end, "\n");
			end += *end == '\n' && i + 1 < ERRORS_KEPT;
		}
		appendStringInfo(&history, "\n%.*s", (int) (end - before), before);
	}
	return idem_clip_text(PointerGetDatum(cstring_to_text_with_len(history.data,
																   history.len)));
}

/*
 * Has a message been taken again, requeued or released since this attempt?
 */
static bool
attempt_is_over(const IdemOutboxRow *row, int attempt)
{
	return attempt != DatumGetInt32(row->values[OUTBOX_ATTEMPT]) ||
		row->nulls[OUTBOX_AWAITING_ACK];
}

/*
 * Return the pause after that number of attempts.  It is exponential, reduced
 * by up to a half at random, so that messages that failed together are not
 * retried together.
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
	IdemCursor	outbox;
	int			requeued = 0;

	idem_cursor_open(&outbox, IDEM_OUTBOX, RowExclusiveLock);
	if (PG_ARGISNULL(0))
		requeued = requeue_all(&outbox);
	else
	{
		int64	   *ids;
		int			nids = ids_arg(fcinfo, &ids);

		for (int i = 0; i < nids; i++)
		{
			if (requeue(&outbox, ids[i]))
				requeued++;
		}
	}
	idem_cursor_close(&outbox);
	PG_RETURN_INT32(requeued);
}

/*
 * Requeue all dead messages.  Returns how many there were.
 */
static int
requeue_all(IdemCursor *outbox)
{
	Snapshot	snapshot = RegisterSnapshot(GetTransactionSnapshot());
	ScanKeyData key;
	int64	   *ids;
	int			size = 64;
	int			nids = 0;
	int			requeued = 0;

	ids = palloc_array(int64, size);
	idem_key_null(&key, ENDED_ACKED_AT);
	idem_scan(outbox, IDEM_OUTBOX_ENDED, snapshot, &key, 1);
	while (idem_scan_next(outbox, ForwardScanDirection))
	{
		CHECK_FOR_INTERRUPTS();
		if (nids == size)
		{
			size *= 2;
			ids = repalloc_huge(ids, size * sizeof(int64));
		}
		ids[nids++] = DatumGetInt64(outbox->row->tts_values[OUTBOX_ID]);
	}
	idem_scan_end(outbox);
	UnregisterSnapshot(snapshot);

	/* In the order of ids_arg(), to avoid deadlocks. */
	qsort_interruptible(ids, nids, sizeof(int64), compare_ids, NULL);
	for (int i = 0; i < nids; i++)
	{
		if (requeue(outbox, ids[i]))
			requeued++;
	}
	return requeued;
}

/*
 * Requeue a dead message, with all its attempts.  Like a new one, it is
 * parked if an earlier message of its key precedes it; see lanes.c.  Returns
 * whether it was dead.
 */
static bool
requeue(IdemCursor *outbox, int64 id)
{
	IdemOutboxRow row;
	bool		has_lane;
	int64		lane = 0;
	bool		parked = false;

	do
	{
		if (!find_dead(outbox, id))
			return false;
		has_lane = !outbox->row->tts_isnull[OUTBOX_KEY_HASH];
		if (has_lane)
		{
			lane = DatumGetInt64(outbox->row->tts_values[OUTBOX_KEY_HASH]);
			parked = idem_lane_is_blocked(outbox, lane, id);
			if (!find_dead(outbox, id))
				return false;
			idem_lane_low_water_expire(lane);
		}
		idem_outbox_copy(outbox, &row);
		idem_outbox_set(&row, OUTBOX_STATE, CStringGetTextDatum("pending"));
		idem_outbox_set(&row, OUTBOX_UNCOUNTED_ATTEMPTS,
						row.values[OUTBOX_ATTEMPT]);
		row.nulls[OUTBOX_AWAITING_ACK] = true;
		idem_outbox_set(&row, OUTBOX_IN_DUE_INDEX, BoolGetDatum(!parked));
		idem_outbox_set(&row, OUTBOX_AVAILABLE_AT,
						TimestampTzGetDatum(GetCurrentTimestamp()));
	} while (!idem_outbox_write(outbox, &row));
	if (parked)
		idem_lane_recheck(outbox, lane, id);
	return true;
}

/*
 * Find a message.  Returns whether it is dead; then its row is in the slot.
 */
static bool
find_dead(IdemCursor *outbox, int64 id)
{
	return idem_outbox_find(outbox, id) && idem_outbox_in_state(outbox, "dead");
}

/*
 * Read argument 0, an array of ids, in ascending order, so that two calls for
 * the same messages cannot deadlock.  Returns their number.  Raises 22004,
 * 22023.
 */
static int
ids_arg(FunctionCallInfo fcinfo, int64 **ids)
{
	IdemArray	array;

	idem_array_arg(fcinfo, 0, "ids", IDEM_ARRAY_REQUIRED, &array);
	*ids = palloc_array(int64, array.length);
	for (int i = 0; i < array.length; i++)
		(*ids)[i] = DatumGetInt64(array.values[i]);
	qsort_interruptible(*ids, array.length, sizeof(int64), compare_ids, NULL);
	return array.length;
}

static int
compare_ids(const void *a, const void *b, void *arg)
{
	int64		ia = *(const int64 *) a;
	int64		ib = *(const int64 *) b;

	return (ia > ib) - (ia < ib);
}
