/*-------------------------------------------------------------------------
 *
 * keys.c
 *		Request keys: claim, look up, forget, erase.
 *
 * A record is one row of idem_keys.  Its state is "started" while a session
 * holds the claim, then "completed" or "failed".  "erased" is a completed
 * record without its response.  In all states, an expired record counts as
 * absent.  The rules for keys apply to new ones: if the rules have changed,
 * the request of an existing record can still be replayed, resumed and
 * completed.
 *
 *				   claim				complete			erase
 *		(absent) -------->  started  --------->  completed ----->  erased
 *						   ^   |  ^ \
 *					 claim |   |  |  \ release
 *						   | fail |	  `-------> (absent)
 *						   |   v  | claim, after the lease has expired
 *						  failed  `---- started
 *
 * A claim is exclusive from its first instant: at first because the row is
 * uncommitted, and after the commit because of its lease.  The holder of a
 * committed claim passes its claim token.  Every new claim of the key
 * replaces the token by a higher one, so a holder whose claim was taken over
 * is refused (fencing).
 *
 * Drawing a token and writing it into the row are one step under the lock of
 * the key (see store/key_lock.c).  So the tokens of a key ascend in the order
 * in which its claims are written, whether or not these commit: nobody can
 * draw a lower token and write it later, whatever happens to the row in
 * between.  Calls that end a claim or delete its record draw no token, and
 * need no such lock; compare and swap ensures that the row is still the one
 * that was found.  A claim that does not get the lock at once returns
 * "in_progress", or waits if it is allowed to.
 *
 * idem_claim() decides from a dirty read (see store/find.c) and writes by
 * compare and swap.  For all outcomes but "new" it locks and writes nothing.
 * A decision about a record's content rests on committed data only.  If
 * another transaction is inserting the key, the outcome is "in_progress"
 * whatever its hash, because that transaction might be rolled back.
 *
 * Times are from the clock at the moment of the decision.  now() would stand
 * still in a long transaction and keep expired leases alive.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "catalog/pg_type_d.h"
#include "common/int.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/claim_holder.h"
#include "keys/key_record.h"
#include "keys/keys.h"
#include "keys/rate_limit.h"
#include "stats/stats.h"
#include "store/key_lock.h"
#include "util/client_text.h"
#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/results.h"
#include "util/settings.h"
#include "util/timed_lock.h"
#include "util/times.h"

/* A result column, and the column of idem_keys that it shows. */
typedef struct ColumnPair
{
	int			result;
	int			keys;
} ColumnPair;

/*
 * A call's wait for a committed claim.  "began" is the time of its first
 * sleep.
 */
typedef struct LeaseWait
{
	bool		entered;
	TimestampTz began;
	TimestampTz deadline;
} LeaseWait;

static const char *const outcome_names[] = {
	[IDEM_CLAIM_NEW] = "new",
	[IDEM_CLAIM_REPLAY] = "replay",
	[IDEM_CLAIM_ERASED] = "erased",
	[IDEM_CLAIM_IN_PROGRESS] = "in_progress",
	[IDEM_CLAIM_HASH_CONFLICT] = "hash_conflict",
	[IDEM_CLAIM_EXPIRED] = "expired",
};

/* The maximum length of a hash: SHA-512. */
#define MAX_HASH_LENGTH		64

/* The types of the columns that idem_claim() and idem_lookup() return. */
static IdemResultType claim_row = {
	.ncolumns = CLAIM_NUM_COLUMNS,
	.columns = {
		TEXTOID, INT8OID, INT4OID, INT4OID, JSONOID, TEXTOID, BYTEAOID,
		TEXTOID, JSONOID, TIMESTAMPTZOID, TIMESTAMPTZOID
	},
};

static IdemResultType lookup_row = {
	.ncolumns = 14,
	.columns = {
		TEXTOID, INT4OID, BYTEAOID, INT4OID, JSONOID, TEXTOID, BYTEAOID,
		TEXTOID, TEXTOID, JSONOID, TIMESTAMPTZOID, TIMESTAMPTZOID,
		TIMESTAMPTZOID, TIMESTAMPTZOID
	},
};

static void sleep_on_lease(IdemCursor *cursor, const Datum *key,
						   LeaseWait *wait);
static void check_stored(const IdemClaimRequest *request);
static IdemClaimOutcome judge(IdemCursor *cursor, const IdemClaimRequest *request,
							  TimestampTz now);
static bool same_hash(IdemCursor *cursor, Datum hash);
static IdemWrite start_claim(IdemCursor *cursor, const IdemClaimRequest *request,
							 IdemClaimResult *result);
static IdemWrite take_over(IdemCursor *cursor, const IdemClaimRequest *request,
						   TimestampTz now, IdemClaimResult *result);
static IdemRateSlot admit_new_key(const IdemClaimRequest *request);
static void begin_record(IdemKeyRecord *record, const IdemClaimRequest *request,
						 int64 previous);
static void report_new(IdemCursor *cursor, const IdemKeyRecord *record,
					   IdemClaimResult *result);
static void report_found(IdemCursor *cursor, IdemClaimResult *result);
static void copy_columns(IdemCursor *cursor, const Datum *from_values,
						 const bool *from_nulls, const ColumnPair *pairs,
						 int npairs, Datum *to_values, bool *to_nulls);

/*
 * idem_claim(scope, key, request_hash, ttl, lease, wait, request) -> row
 */
PG_FUNCTION_INFO_V1(idem_claim);
Datum
idem_claim(PG_FUNCTION_ARGS)
{
	IdemClaimRequest request;
	IdemClaimResult result;

	idem_writer_key_args(fcinfo, request.key);
	request.request_hash = (Datum) 0;
	if (!PG_ARGISNULL(2))
	{
		request.request_hash = PointerGetDatum(PG_GETARG_BYTEA_PP(2));
		idem_check_hash(request.request_hash, "request_hash");
	}
	idem_check_hash_given(request.request_hash, "request_hash");
	request.ttl = idem_interval_arg(fcinfo, 3, "ttl");
	request.lease = idem_interval_arg(fcinfo, 4, "lease");
	request.wait = idem_interval_arg(fcinfo, 5, "wait");
	request.stored = (Datum) 0;
	if (!PG_ARGISNULL(6))
	{
		request.stored = PG_GETARG_DATUM(6);
		check_stored(&request);
	}

	idem_claim_key(&request, &result);
	PG_RETURN_DATUM(idem_result(fcinfo, &claim_row, result.values,
								result.nulls));
}

/*
 * Raise 54000 for a request that is too large to be stored, or too large to
 * be returned by idem_resume() with others; and 22P05 or 22021 if the request
 * or its scope cannot be converted to UTF-8.
 */
static void
check_stored(const IdemClaimRequest *request)
{
	int64		limit;

	(void) idem_check_size(request->stored, "request");
	limit = idem_json_text_limit(toast_raw_datum_size(request->stored),
								 IDEM_MAX_TEXT_SIZE);
	if (limit != 0 && idem_json_text_size(request->stored, limit) > limit)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("argument \"%s\" is too large", "request"),
				 errdetail("It has more than " INT64_FORMAT " bytes of text.",
						   limit),
				 errhint("Store a reference to it.")));
	(void) idem_check_client_json(request->stored);
	(void) idem_check_client_text(request->key[0]);
}

/*
 * Raise 22023 for an invalid request hash; "name" is its name in the message.
 */
void
idem_check_hash(Datum hash, const char *name)
{
	int			length = VARSIZE_ANY_EXHDR(DatumGetByteaPP(hash));

	if (length < 1 || length > MAX_HASH_LENGTH)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must have 1 to %d bytes",
						name, MAX_HASH_LENGTH),
				 errhint("Use idem_request_hash(), or another digest of the request.")));
}

/*
 * Raise 22004 for a missing request hash if the operator requires hashes.
 */
void
idem_check_hash_given(Datum hash, const char *name)
{
	if (idem_require_request_hash && DatumGetPointer(hash) == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("argument \"%s\" must not be null", name),
				 errdetail("The setting \"%s\" is on.",
						   "idempotency.require_request_hash"),
				 errhint("Pass idem_request_hash(), or another digest of the request.")));
}

/*
 * Claim a key.  The result's values are in the current memory context.
 */
void
idem_claim_key(const IdemClaimRequest *request, IdemClaimResult *result)
{
	IdemCursor	keys;

	idem_cursor_open(&keys, IDEM_KEYS, RowExclusiveLock);
	idem_claim_in(&keys, request, result);
	idem_cursor_close(&keys);
}

/*
 * The same, with idem_keys open already.  A wait closes and reopens it.
 */
void
idem_claim_in(IdemCursor *cursor, const IdemClaimRequest *request,
			  IdemClaimResult *result)
{
	IdemKeyLock lock = {0};
	TimestampTz start = GetCurrentTimestamp();
	TimestampTz wait_until = idem_add_interval(start, request->wait, 0);
	bool		waits = wait_until > start;
	LeaseWait	lease_wait = {.deadline = wait_until};

	memset(result->nulls, true, sizeof(result->nulls));

	for (bool again = false;; again = true)
	{
		IdemFind	found;
		TimestampTz now;
		bool		held;

		CHECK_FOR_INTERRUPTS();
		if (again)
			idem_check_client();
		found = idem_find(cursor, request->key);
		now = GetCurrentTimestamp();
		result->outcome = found == IDEM_FIND_NONE ? IDEM_CLAIM_NEW :
			found == IDEM_FIND_ROW ? judge(cursor, request, now) :
			IDEM_CLAIM_IN_PROGRESS;

		held = TransactionIdIsValid(cursor->holder);
		if (result->outcome == IDEM_CLAIM_NEW && !held)
		{
			if (lock.held || idem_key_lock(&lock, cursor, request->key))
			{
				IdemWrite	written = found == IDEM_FIND_NONE ?
					start_claim(cursor, request, result) :
					take_over(cursor, request, now, result);

				if (written == IDEM_WRITE_DONE)
					break;
				if (written == IDEM_WRITE_STALE)
					continue;
				held = true;	/* by a row lock, or a writer that came since */
			}
			else if (waits && idem_key_lock_until(&lock, cursor, request->key,
												  wait_until))
				continue;
		}
		idem_key_unlock(&lock);

		/*
		 * The outcome would be "new", but another transaction or call holds
		 * the key.
		 */
		if (result->outcome == IDEM_CLAIM_NEW)
		{
			result->outcome = IDEM_CLAIM_IN_PROGRESS;
			found = IDEM_FIND_PENDING;
		}
		if (result->outcome == IDEM_CLAIM_IN_PROGRESS && held && waits &&
			idem_wait_until(cursor, wait_until))
			continue;
		if (result->outcome == IDEM_CLAIM_IN_PROGRESS && waits &&
			found == IDEM_FIND_ROW && !held && !cursor->row_is_own &&
			now < wait_until)
		{
			sleep_on_lease(cursor, request->key, &lease_wait);
			continue;
		}

		if (found == IDEM_FIND_ROW)
			report_found(cursor, result);
		break;
	}
	idem_key_unlock(&lock);
	idem_await_end();
	if (result->outcome == IDEM_CLAIM_IN_PROGRESS)
		idem_log_in_progress_event(request->key);

	idem_count(IDEM_COUNT_CLAIMS + result->outcome, 1);
	result->values[CLAIM_OUTCOME] =
		CStringGetTextDatum(outcome_names[result->outcome]);
	result->nulls[CLAIM_OUTCOME] = false;
}

/*
 * Another session holds the found claim, and has committed it.  Sleep until
 * the claim might have changed, its lease has ended, or the call's wait has.
 * The first call returns at once, so that the caller looks again after it can
 * be woken.
 *
 * The table is left meanwhile, so that nobody has to wait for us.
 *
 * This is not a lock, but to the caller it is the same wait for the same key.
 * So lock_timeout limits it, too: raises 55P03.
 */
static void
sleep_on_lease(IdemCursor *cursor, const Datum *key, LeaseWait *wait)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz lease_end;
	TimestampTz deadline = wait->deadline;

	if (!wait->entered)
	{
		wait->entered = true;
		wait->began = now;
		idem_await_claim(key);
		return;
	}

	if (LockTimeout > 0)
	{
		TimestampTz limit = TimestampTzPlusMilliseconds(wait->began,
														LockTimeout);

		if (now >= limit)
			ereport(ERROR,
					(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
					 errmsg("canceling statement due to lock timeout")));
		deadline = Min(deadline, limit);
	}

	lease_end = DatumGetTimestampTz(cursor->row->tts_values[KEYS_LEASE_EXPIRES_AT]);
	idem_cursor_leave(cursor, RowExclusiveLock);
	idem_await_change(lease_end, deadline);
	idem_cursor_open(cursor, IDEM_KEYS, RowExclusiveLock);
}

/*
 * Return the outcome for the found row.  IDEM_CLAIM_NEW: it can be taken
 * over, unless another transaction holds it.
 */
static IdemClaimOutcome
judge(IdemCursor *cursor, const IdemClaimRequest *request, TimestampTz now)
{
	Datum	   *values = cursor->row->tts_values;

	if (idem_found_is_expired(cursor, now))
	{
		TimestampTz expires_at = DatumGetTimestampTz(values[KEYS_EXPIRES_AT]);

		if (idem_expired_key_policy == IDEM_EXPIRED_REJECT &&
			(idem_tombstone_retention == 0 ||
			 now < idem_add_ms(expires_at, idem_tombstone_retention)))
			return IDEM_CLAIM_EXPIRED;
		return IDEM_CLAIM_NEW;
	}

	if (!same_hash(cursor, request->request_hash))
		return IDEM_CLAIM_HASH_CONFLICT;

	switch (idem_found_state(cursor))
	{
		case IDEM_STATE_COMPLETED:
			return IDEM_CLAIM_REPLAY;
		case IDEM_STATE_ERASED:
			return IDEM_CLAIM_ERASED;
		case IDEM_STATE_FAILED:
			return IDEM_CLAIM_NEW;
		case IDEM_STATE_STARTED:
			break;
	}

	/* Only a row from outside has no lease; its lease counts as expired. */
	if (cursor->row_is_own ||
		(!cursor->row->tts_isnull[KEYS_LEASE_EXPIRES_AT] &&
		 now < DatumGetTimestampTz(values[KEYS_LEASE_EXPIRES_AT])))
		return IDEM_CLAIM_IN_PROGRESS;
	return IDEM_CLAIM_NEW;
}

/*
 * Does the found row belong to the same request, as far as known?
 */
static bool
same_hash(IdemCursor *cursor, Datum hash)
{
	bytea	   *stored;
	bytea	   *given = (bytea *) DatumGetPointer(hash);

	if (given == NULL || cursor->row->tts_isnull[KEYS_REQUEST_HASH])
		return true;

	stored = DatumGetByteaPP(cursor->row->tts_values[KEYS_REQUEST_HASH]);
	return VARSIZE_ANY_EXHDR(stored) == VARSIZE_ANY_EXHDR(given) &&
		memcmp(VARDATA_ANY(stored), VARDATA_ANY(given),
			   VARSIZE_ANY_EXHDR(given)) == 0;
}

/*
 * Claim a key that has no row, under its lock.  IDEM_WRITE_STALE: it has one
 * after all.  Raises ID001, ID002.
 */
static IdemWrite
start_claim(IdemCursor *cursor, const IdemClaimRequest *request,
			IdemClaimResult *result)
{
	IdemRateSlot admitted = admit_new_key(request);
	IdemKeyRecord record;

	begin_record(&record, request, 0);
	if (idem_insert(cursor, record.values, record.nulls))
	{
		report_new(cursor, &record, result);
		return IDEM_WRITE_DONE;
	}
	idem_withdraw_new_key(request->key[0], admitted);
	return IDEM_WRITE_STALE;
}

/*
 * Claim the found row, under its key's lock.  If it has expired, the claim is
 * a new one; otherwise it is the next attempt, which keeps the state that
 * earlier attempts have left.  Raises ID001 and ID002 for an expired row,
 * 2200H and 22003 if there is no next token or attempt.
 */
static IdemWrite
take_over(IdemCursor *cursor, const IdemClaimRequest *request,
		  TimestampTz now, IdemClaimResult *result)
{
	Datum	   *values = cursor->row->tts_values;
	int64		token = DatumGetInt64(values[KEYS_CLAIM_TOKEN]);
	bool		expired = idem_found_is_expired(cursor, now);
	IdemRateSlot admitted = IDEM_NOT_COUNTED;
	IdemKeyRecord record;
	IdemWrite	written;

	if (expired)
		admitted = admit_new_key(request);
	begin_record(&record, request, token);

	/* Drawing a token can wait, and the record expire meanwhile. */
	now = DatumGetTimestampTz(record.values[KEYS_CREATED_AT]);
	if (idem_found_is_expired(cursor, now) != expired)
	{
		idem_withdraw_new_key(request->key[0], admitted);
		return IDEM_WRITE_STALE;
	}
	if (!expired)
	{
		int32		attempt = DatumGetInt32(values[KEYS_ATTEMPT]);

		if (pg_add_s32_overflow(attempt, 1, &attempt))
			ereport(ERROR,
					(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
					 errmsg("too many attempts at idempotency key %s",
							idem_redacted_key(request->key[1])),
					 errhint("Delete the record with idem_forget().")));
		idem_record_set(&record, KEYS_ATTEMPT, Int32GetDatum(attempt));
		record.given[KEYS_CREATED_AT] = false;
		record.given[KEYS_RECOVERY_POINT] = false;
		record.given[KEYS_RECOVERY_STATE] = false;
		if (record.nulls[KEYS_REQUEST_HASH])
			record.given[KEYS_REQUEST_HASH] = false;
		if (record.nulls[KEYS_REQUEST])
			record.given[KEYS_REQUEST] = false;
		idem_record_keep(&record, cursor);
		idem_record_set_resume_at(&record, IDEM_STATE_STARTED, now);
	}

	written = idem_update(cursor, record.values, record.nulls, false);
	if (written == IDEM_WRITE_DONE)
	{
		if (!expired)
			idem_count(IDEM_COUNT_TAKEOVERS, 1);
		report_new(cursor, &record, result);
	}
	else
		idem_withdraw_new_key(request->key[0], admitted);
	return written;
}

/*
 * Raise ID001 or ID002 unless the key is allowed as a new one.
 */
static IdemRateSlot
admit_new_key(const IdemClaimRequest *request)
{
	idem_check_new_key(request->key[1]);
	return idem_admit_new_key(request->key[0]);
}

/*
 * Make the row of a first attempt.  Its token is above "previous".  Drawing
 * it can wait for a session that alters the sequence, so the clock is read
 * afterwards.
 */
static void
begin_record(IdemKeyRecord *record, const IdemClaimRequest *request,
			 int64 previous)
{
	int64		token = idem_next_claim_token(previous);
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz expires_at = idem_add_interval(now, request->ttl,
											   idem_default_ttl);
	TimestampTz lease_expires_at = idem_add_interval(now, request->lease,
													 idem_default_lease);

	memset(record->nulls, true, sizeof(record->nulls));
	memset(record->given, true, sizeof(record->given));
	idem_record_set(record, KEYS_CLAIM_TOKEN, Int64GetDatum(token));
	idem_record_set(record, KEYS_CREATED_AT, TimestampTzGetDatum(now));
	idem_record_set(record, KEYS_LEASE_EXPIRES_AT,
					TimestampTzGetDatum(Min(lease_expires_at, expires_at)));
	idem_record_set(record, KEYS_EXPIRES_AT, TimestampTzGetDatum(expires_at));
	idem_record_set(record, KEYS_ATTEMPT, Int32GetDatum(1));
	idem_record_set(record, KEYS_STATE, idem_state_datum(IDEM_STATE_STARTED));
	idem_record_set(record, KEYS_SCOPE, request->key[0]);
	idem_record_set(record, KEYS_KEY, request->key[1]);
	idem_record_set_or_null(record, KEYS_REQUEST_HASH, request->request_hash);
	idem_record_set_or_null(record, KEYS_REQUEST, request->stored);
	idem_record_set_resume_at(record, IDEM_STATE_STARTED, now);
	IDEM_INJECTION_POINT("idem-claim-drawn");
}

/*
 * Called after writing the claim: remember it as our own, and report it.
 */
static void
report_new(IdemCursor *cursor, const IdemKeyRecord *record,
		   IdemClaimResult *result)
{
	static const ColumnPair columns[] = {
		{CLAIM_TOKEN, KEYS_CLAIM_TOKEN},
		{CLAIM_ATTEMPT, KEYS_ATTEMPT},
		{CLAIM_RECOVERY_POINT, KEYS_RECOVERY_POINT},
		{CLAIM_RECOVERY_STATE, KEYS_RECOVERY_STATE},
		{CLAIM_LEASE_EXPIRES_AT, KEYS_LEASE_EXPIRES_AT},
		{CLAIM_EXPIRES_AT, KEYS_EXPIRES_AT},
	};

	bool		first = DatumGetInt32(record->values[KEYS_ATTEMPT]) == 1;

	idem_remember_claim(DatumGetInt64(record->values[KEYS_CLAIM_TOKEN]));
	idem_log_key_event(first ? IDEM_EVENT_CLAIMED : IDEM_EVENT_TAKEN_OVER,
					   record->values);
	result->outcome = IDEM_CLAIM_NEW;
	copy_columns(cursor, record->values, record->nulls,
				 columns, lengthof(columns), result->values, result->nulls);
}

/*
 * Report the part of the found row that the outcome shows.
 */
static void
report_found(IdemCursor *cursor, IdemClaimResult *result)
{
	static const ColumnPair response[] = {
		{CLAIM_RESPONSE_STATUS, KEYS_RESPONSE_STATUS},
		{CLAIM_RESPONSE_HEADERS, KEYS_RESPONSE_HEADERS},
		{CLAIM_RESPONSE_BODY, KEYS_RESPONSE_BODY},
		{CLAIM_RESPONSE_BYTES, KEYS_RESPONSE_BYTES},
		{CLAIM_EXPIRES_AT, KEYS_EXPIRES_AT},
	};
	static const ColumnPair lease[] = {
		{CLAIM_LEASE_EXPIRES_AT, KEYS_LEASE_EXPIRES_AT},
	};
	const ColumnPair *columns = NULL;
	int			ncolumns = 0;

	if (result->outcome == IDEM_CLAIM_REPLAY ||
		result->outcome == IDEM_CLAIM_ERASED)
	{
		columns = response;
		ncolumns = lengthof(response);
	}
	else if (result->outcome == IDEM_CLAIM_IN_PROGRESS && !cursor->row_is_own)
	{
		columns = lease;
		ncolumns = lengthof(lease);
	}
	copy_columns(cursor, cursor->row->tts_values, cursor->row->tts_isnull,
				 columns, ncolumns, result->values, result->nulls);

	if (result->outcome == IDEM_CLAIM_REPLAY)
		idem_log_key_event(IDEM_EVENT_REPLAYED, cursor->row->tts_values);
	else if (result->outcome == IDEM_CLAIM_HASH_CONFLICT)
		idem_log_key_event(IDEM_EVENT_HASH_CONFLICT, cursor->row->tts_values);
}

/*
 * Copy columns of a row of idem_keys into a result that outlives the record.
 */
static void
copy_columns(IdemCursor *cursor, const Datum *from_values,
			 const bool *from_nulls, const ColumnPair *pairs, int npairs,
			 Datum *to_values, bool *to_nulls)
{
	for (int i = 0; i < npairs; i++)
	{
		int			from = pairs[i].keys;
		int			to = pairs[i].result;
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(cursor->table->rel),
											  from);

		to_nulls[to] = from_nulls[from];
		if (!from_nulls[from])
			to_values[to] = datumCopy(from_values[from],
									  att->attbyval, att->attlen);
	}
}

/*
 * idem_lookup(scope, key) -> row
 */
PG_FUNCTION_INFO_V1(idem_lookup);
Datum
idem_lookup(PG_FUNCTION_ARGS)
{
	static const ColumnPair columns[] = {
		{0, KEYS_STATE},
		{1, KEYS_ATTEMPT},
		{2, KEYS_REQUEST_HASH},
		{3, KEYS_RESPONSE_STATUS},
		{4, KEYS_RESPONSE_HEADERS},
		{5, KEYS_RESPONSE_BODY},
		{6, KEYS_RESPONSE_BYTES},
		{7, KEYS_ERROR},
		{8, KEYS_RECOVERY_POINT},
		{9, KEYS_RECOVERY_STATE},
		{10, KEYS_CREATED_AT},
		{11, KEYS_COMPLETED_AT},
		{12, KEYS_LEASE_EXPIRES_AT},
		{13, KEYS_EXPIRES_AT},
	};
	Datum		key[2];
	IdemCursor	cursor;
	Datum		values[lengthof(columns)];
	bool		nulls[lengthof(columns)];

	idem_key_args(fcinfo, key);
	memset(nulls, true, sizeof(nulls));
	idem_cursor_open(&cursor, IDEM_KEYS, AccessShareLock);
	if (!idem_find_visible(&cursor, key, GetActiveSnapshot()))
		idem_check_new_key(key[1]);
	else if (!idem_found_is_expired(&cursor, GetCurrentTimestamp()))
		copy_columns(&cursor, cursor.row->tts_values, cursor.row->tts_isnull,
					 columns, lengthof(columns), values, nulls);
	idem_cursor_close(&cursor);
	PG_RETURN_DATUM(idem_result(fcinfo, &lookup_row, values, nulls));
}

/*
 * idem_forget(scope, key) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_forget);
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemCursor	cursor;
	bool		found;

	idem_writer_key_args(fcinfo, key);
	idem_cursor_open(&cursor, IDEM_KEYS, RowExclusiveLock);
	do
	{
		CHECK_FOR_INTERRUPTS();
		found = idem_find_latest(&cursor, key, NULL);
	} while (found && idem_delete(&cursor, true) == IDEM_WRITE_STALE);
	if (found)
		idem_notify_claim_end(key);
	else
		idem_check_new_key(key[1]);
	idem_cursor_close(&cursor);
	PG_RETURN_BOOL(found);
}

/*
 * idem_erase(scope, key) -> boolean
 *
 * The holder of a claim keeps it, and its next attempt resumes at the
 * recovery point, without the state.  Without the request, idem_resume() does
 * not find it any more.  Also erases expired records: personal data must not
 * stay until the next cleanup.
 */
PG_FUNCTION_INFO_V1(idem_erase);
Datum
idem_erase(PG_FUNCTION_ARGS)
{
	static const int columns[] = {
		KEYS_RESPONSE_HEADERS,
		KEYS_RESPONSE_BODY,
		KEYS_RESPONSE_BYTES,
		KEYS_ERROR,
		KEYS_RECOVERY_STATE,
		KEYS_REQUEST,
		KEYS_RESUME_AT,
	};
	Datum		key[2];
	IdemCursor	cursor;
	bool		erases;

	idem_writer_key_args(fcinfo, key);
	idem_cursor_open(&cursor, IDEM_KEYS, RowExclusiveLock);
	for (;;)
	{
		IdemKeyRecord change = {0};

		CHECK_FOR_INTERRUPTS();
		if (!idem_find_latest(&cursor, key, NULL))
		{
			idem_check_new_key(key[1]);
			erases = false;
			break;
		}

		erases = idem_found_state(&cursor) == IDEM_STATE_COMPLETED;
		if (erases)
			idem_record_set(&change, KEYS_STATE,
							idem_state_datum(IDEM_STATE_ERASED));
		for (int i = 0; i < lengthof(columns); i++)
		{
			erases |= !cursor.row->tts_isnull[columns[i]];
			idem_record_set_or_null(&change, columns[i], (Datum) 0);
		}
		if (!erases)
			break;

		idem_record_keep(&change, &cursor);
		if (idem_update(&cursor, change.values, change.nulls,
						true) != IDEM_WRITE_STALE)
			break;
	}
	idem_cursor_close(&cursor);
	PG_RETURN_BOOL(erases);
}
