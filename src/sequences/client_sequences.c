/*-------------------------------------------------------------------------
 *
 * client_sequences.c
 *		Client sequences: each of a client's events is appended once.
 *
 * A row of idem_client_sequences holds the last sequence number of a client
 * on an aggregate, a row of idem_aggregates the aggregate's version.  Every
 * append writes both, the aggregate first, in the same transaction.
 * Therefore the row lock of the aggregate also protects the sequences.
 *
 * idem_try_append() reads in the same order, the aggregate and then the
 * sequence, decides, and writes the aggregate by compare and swap.  If that
 * succeeds, nobody has written the sequence since it was read, because that
 * would have needed a write to the aggregate in between.  No other order of
 * steps lets a call end without an append and without anything to undo.
 *
 * A call queues behind another client's append as an UPDATE does.  But unless
 * it was asked to wait, it must not sleep on its twin, an append for the same
 * client.  The aggregate's row alone does not distinguish the two, because
 * the twin can be between its two writes.  So a call that is going to write,
 * or to queue, needs the key lock of the sequence (store/key_lock.c), from
 * before its last look until it has written both rows or has given up:
 *
 *	- A call that does not get the lock has met its twin in the middle of its
 *	  call, and returns "in_flight".  With "wait", it sleeps on the lock until
 *	  the deadline, and then looks again, holding the lock.
 *
 *	- A call that has the lock sees all that a twin has written.  If the
 *	  aggregate is unchanged, and nobody is writing it, there is nothing.
 *	  Otherwise it looks again.  If another transaction is writing the
 *	  sequence, that is in flight, and the lock is released before any sleep
 *	  on it.  If not, the aggregate's holder is another client, and stays so,
 *	  because no twin gets further than to the lock.
 *
 *	- A transaction that has written the aggregate itself needs no lock,
 *	  because its row keeps all others out.  If it needed the lock, it could
 *	  not append for a client that queues behind it.  (That client continues
 *	  to sleep, although its twin is in flight now: it has to wait for the end
 *	  of the same transaction.)
 *
 * The lock is never kept beyond a call, so prepared transactions have none,
 * and an error releases it.  Waiting for an aggregate with the lock held can
 * be part of a deadlock, as any wait for a row can.
 *
 * A committed sequence number is final, because it only grows: a number at or
 * below it is a duplicate, whatever another transaction is going to do.  A
 * transaction that waits for its synchronous standby still counts as running,
 * so its append is "in_flight" until it is confirmed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type_d.h"
#include "common/int.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "stats/stats.h"
#include "store/key_lock.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/log_events.h"
#include "util/pinned_scope.h"
#include "util/results.h"
#include "util/timed_lock.h"
#include "util/times.h"

/* The columns of idem_aggregates, in order. */
enum
{
	AGGREGATES_VERSION,
	AGGREGATES_AGGREGATE,
	AGGREGATES_NUM_COLUMNS,
};

/* The columns of idem_client_sequences, in order. */
enum
{
	SEQUENCES_LAST_CLIENT_SEQ,
	SEQUENCES_AGGREGATE,
	SEQUENCES_CLIENT_ID,
	SEQUENCES_NUM_COLUMNS,
};

typedef enum AppendOutcome
{
	APPENDED,
	DUPLICATE,
	OVERLAP,
	GAP,
	IN_FLIGHT,
	VERSION_CONFLICT,
	UNDECIDED,					/* not an outcome: look again */
} AppendOutcome;

static const char *const outcome_names[] = {
	[APPENDED] = "appended",
	[DUPLICATE] = "duplicate",
	[OVERLAP] = "overlap",
	[GAP] = "gap",
	[IN_FLIGHT] = "in_flight",
	[VERSION_CONFLICT] = "version_conflict",
};

typedef struct AppendRequest
{
	Datum		key[2];			/* aggregate and client id, text */
	int64		first_seq;
	int64		last_seq;
	int64		event_count;
	bool		has_expected_version;
	int64		expected_version;
	bool		allow_gaps;
} AppendRequest;

/* The types of the columns that idem_try_append() returns. */
static IdemResultType append_row = {
	.ncolumns = 3,
	.columns = {TEXTOID, INT8OID, INT8OID},
};

static int64 found_last_seq(IdemCursor *sequences);
static void append_args(FunctionCallInfo fcinfo, AppendRequest *request);
static AppendOutcome try_append(const AppendRequest *request,
								IdemCursor *aggregates, IdemCursor *sequences,
								IdemKeyLock *lock,
								int64 *last_seq, int64 *version);
static bool wait_for_twin(const AppendRequest *request, IdemCursor *sequences,
						  IdemKeyLock *lock, TimestampTz deadline);
static IdemFind find_version(IdemCursor *aggregates, const Datum *key,
							 int64 *version);
static AppendOutcome answer_at(AppendOutcome outcome, IdemCursor *aggregates,
							   const Datum *key, int64 version);
static void write_sequence(IdemCursor *sequences, IdemFind found,
						   const AppendRequest *request);
static void log_append_event(AppendOutcome outcome,
							 const AppendRequest *request, int64 version);

/*
 * idem_try_append(aggregate, client_id, client_seq, event_count,
 *				   expected_version, allow_gaps, wait)
 *		-> outcome, last_client_seq, version
 */
PG_FUNCTION_INFO_V1(idem_try_append);
Datum
idem_try_append(PG_FUNCTION_ARGS)
{
	AppendRequest request;
	AppendOutcome outcome;
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz wait_until;
	IdemCursor	aggregates;
	IdemCursor	sequences;
	IdemKeyLock lock = {0};
	bool		again = false;
	int64		last_seq;
	int64		version;
	Datum		values[3];
	bool		nulls[3] = {0};

	append_args(fcinfo, &request);
	wait_until = idem_add_interval(now, idem_interval_arg(fcinfo, 6, "wait"),
								   0);

	idem_cursor_open(&aggregates, IDEM_AGGREGATES, RowExclusiveLock);
	idem_cursor_open(&sequences, IDEM_CLIENT_SEQUENCES, RowExclusiveLock);
	for (;; again = true)
	{
		CHECK_FOR_INTERRUPTS();
		outcome = try_append(&request, &aggregates, &sequences, &lock,
							 &last_seq, &version);
		if (outcome == UNDECIDED)
			continue;
		if (outcome == IN_FLIGHT && wait_until > now &&
			wait_for_twin(&request, &sequences, &lock, wait_until))
			continue;
		break;
	}
	if (again && outcome == APPENDED)
		idem_check_client();	/* the last sleep was in an update */
	idem_key_unlock(&lock);
	idem_cursor_close(&sequences);
	idem_cursor_close(&aggregates);

	idem_count(IDEM_COUNT_APPENDS + outcome, 1);
	log_append_event(outcome, &request, version);
	values[0] = CStringGetTextDatum(outcome_names[outcome]);
	values[1] = Int64GetDatum(last_seq);
	values[2] = Int64GetDatum(version);
	PG_RETURN_DATUM(idem_result(fcinfo, &append_row, values, nulls));
}

/*
 * idem_last_client_seq(aggregate, client_id) -> bigint
 */
PG_FUNCTION_INFO_V1(idem_last_client_seq);
Datum
idem_last_client_seq(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemCursor	sequences;
	int64		last_seq = 0;

	key[0] = idem_name_arg(fcinfo, 0, "aggregate");
	key[1] = idem_name_arg(fcinfo, 1, "client_id");

	idem_cursor_open(&sequences, IDEM_CLIENT_SEQUENCES, AccessShareLock);
	if (idem_find_visible(&sequences, key, GetActiveSnapshot()))
		last_seq = found_last_seq(&sequences);
	idem_cursor_close(&sequences);
	PG_RETURN_INT64(last_seq);
}

static int64
found_last_seq(IdemCursor *sequences)
{
	Datum	   *found = sequences->row->tts_values;

	return DatumGetInt64(found[SEQUENCES_LAST_CLIENT_SEQ]);
}

/*
 * Read the arguments; NULL stands for the default.  Raises 22004, 22023, and
 * 55000 for an aggregate that is not pinned.
 */
static void
append_args(FunctionCallInfo fcinfo, AppendRequest *request)
{
	request->key[0] = idem_name_arg(fcinfo, 0, "aggregate");
	idem_check_pin(request->key[0]);
	request->key[1] = idem_name_arg(fcinfo, 1, "client_id");
	request->first_seq = DatumGetInt64(idem_required_arg(fcinfo, 2,
														 "client_seq"));
	request->event_count = PG_ARGISNULL(3) ? 1 : PG_GETARG_INT32(3);
	request->has_expected_version = !PG_ARGISNULL(4);
	if (request->has_expected_version)
		request->expected_version = PG_GETARG_INT64(4);
	request->allow_gaps = PG_ARGISNULL(5) || PG_GETARG_BOOL(5);

	if (request->first_seq < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "client_seq"),
				 errhint("Number a client's events from 1.")));
	if (request->event_count < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "event_count")));
	if (pg_add_s64_overflow(request->first_seq, request->event_count - 1,
							&request->last_seq))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("client sequence out of range")));
}

/*
 * Decide about an append with the current rows, and carry it out.
 *
 * Sets the sequence number and the version that the outcome is based on, or
 * has produced.  After IN_FLIGHT, the twin is sequences->holder, or if there
 * is none, the holder of the lock.  Can return with the lock held.
 */
static AppendOutcome
try_append(const AppendRequest *request, IdemCursor *aggregates,
		   IdemCursor *sequences, IdemKeyLock *lock,
		   int64 *last_seq, int64 *version)
{
	AppendOutcome outcome = UNDECIDED;
	IdemFind	aggregate;
	IdemFind	sequence;
	Datum		values[AGGREGATES_NUM_COLUMNS];
	bool		nulls[AGGREGATES_NUM_COLUMNS] = {0};
	bool		conflict;
	bool		written;

	aggregate = find_version(aggregates, request->key, version);
	sequence = idem_find(sequences, request->key);
	if (sequence == IDEM_FIND_NONE &&
		idem_find_latest(sequences, request->key, NULL))
		return UNDECIDED;
	*last_seq = sequence == IDEM_FIND_ROW ?
		found_last_seq(sequences) : 0;

	if (request->last_seq <= *last_seq)
		outcome = DUPLICATE;
	else if (TransactionIdIsValid(sequences->holder))
		outcome = IN_FLIGHT;
	else if (request->first_seq <= *last_seq)
		outcome = OVERLAP;
	else if (!request->allow_gaps && request->first_seq != *last_seq + 1)
		outcome = GAP;
	if (outcome != UNDECIDED)
		return answer_at(outcome, aggregates, request->key, *version);

	conflict = request->has_expected_version &&
		request->expected_version != *version;
	if (conflict && !TransactionIdIsValid(aggregates->holder))
		return answer_at(VERSION_CONFLICT, aggregates, request->key, *version);

	if (!lock->held &&
		!(aggregate == IDEM_FIND_ROW && aggregates->row_is_own))
	{
		int64		now;

		if (!idem_key_lock(lock, sequences, request->key))
			return answer_at(IN_FLIGHT, aggregates, request->key, *version);
		aggregate = find_version(aggregates, request->key, &now);
		if (now != *version || TransactionIdIsValid(aggregates->holder))
			return UNDECIDED;
	}

	/* Another client is appending; an update queues behind it. */
	if (aggregate == IDEM_FIND_PENDING || conflict)
	{
		idem_wait(aggregates);
		return UNDECIDED;
	}

	if (pg_add_s64_overflow(*version, request->event_count, version))
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("aggregate version out of range")));
	values[AGGREGATES_VERSION] = Int64GetDatum(*version);
	values[AGGREGATES_AGGREGATE] = request->key[0];
	if (aggregate == IDEM_FIND_NONE)
		written = idem_insert(aggregates, values, nulls);
	else
		written = idem_update(aggregates, values, nulls,
							  true) == IDEM_WRITE_DONE;
	if (!written)
		return UNDECIDED;

	IDEM_INJECTION_POINT("idem-append-counted");
	write_sequence(sequences, sequence, request);
	*last_seq = request->last_seq;
	return APPENDED;
}

/*
 * Sleep after IN_FLIGHT until the caller should look again, but not past
 * "deadline".  Returns false if the deadline was reached.  Can return with
 * the lock held.
 */
static bool
wait_for_twin(const AppendRequest *request, IdemCursor *sequences,
			  IdemKeyLock *lock, TimestampTz deadline)
{
	if (!TransactionIdIsValid(sequences->holder))
		return idem_key_lock_until(lock, sequences, request->key, deadline);
	idem_key_unlock(lock);
	return idem_wait_until(sequences, deadline);
}

/*
 * Find an aggregate, and its version; 0 if it does not exist.
 */
static IdemFind
find_version(IdemCursor *aggregates, const Datum *key, int64 *version)
{
	IdemFind	found = idem_find(aggregates, key);

	*version = found == IDEM_FIND_ROW ?
		DatumGetInt64(aggregates->row->tts_values[AGGREGATES_VERSION]) : 0;
	return found;
}

/*
 * Return the outcome of a call that changes nothing, if the version that was
 * read before the sequence is still valid.  Otherwise an append came in
 * between, and might be visible in one of the rows only.
 */
static AppendOutcome
answer_at(AppendOutcome outcome, IdemCursor *aggregates, const Datum *key,
		  int64 version)
{
	int64		now;

	(void) find_version(aggregates, key, &now);
	return now == version ? outcome : UNDECIDED;
}

/*
 * Write the sequence number.  The aggregate's row is our own.
 */
static void
write_sequence(IdemCursor *sequences, IdemFind found,
			   const AppendRequest *request)
{
	Datum		values[SEQUENCES_NUM_COLUMNS];
	bool		nulls[SEQUENCES_NUM_COLUMNS] = {0};
	bool		written;

	values[SEQUENCES_LAST_CLIENT_SEQ] = Int64GetDatum(request->last_seq);
	values[SEQUENCES_AGGREGATE] = request->key[0];
	values[SEQUENCES_CLIENT_ID] = request->key[1];
	if (found == IDEM_FIND_NONE)
		written = idem_insert(sequences, values, nulls);
	else
		written = idem_update(sequences, values, nulls,
							  true) == IDEM_WRITE_DONE;

	/* Only a write from outside these functions can have come in between. */
	if (!written)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to concurrent update"),
				 errdetail("Table \"%s\" was written without its functions.",
						   RelationGetRelationName(sequences->table->rel))));
}

/*
 * Log the outcome of an append.
 */
static void
log_append_event(AppendOutcome outcome, const AppendRequest *request,
				 int64 version)
{
	IdemEvent	event = outcome == APPENDED ? IDEM_EVENT_APPENDED :
		IDEM_EVENT_NOT_APPENDED;
	StringInfoData line;

	if (!idem_event_is_logged(event))
		return;
	idem_log_begin(&line, event);
	idem_log_text(&line, "aggregate", request->key[0]);
	idem_log_text(&line, "client", request->key[1]);
	idem_log_number(&line, "client_seq", request->first_seq);
	idem_log_number(&line, "events", request->event_count);
	if (outcome != APPENDED)
		idem_log_text(&line, "outcome",
					  CStringGetTextDatum(outcome_names[outcome]));
	idem_log_number(&line, "version", version);
	idem_log_end(&line);
}
