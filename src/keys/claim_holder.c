/*-------------------------------------------------------------------------
 *
 * claim_holder.c
 *		Calls of a claim's holder: complete, checkpoint, heartbeat, fail, release.
 *
 * The holder of a committed claim passes its claim token.  A claim that the
 * current transaction has made needs none, because nobody else can have
 * changed it.
 *
 * Every function reads the newest committed version of the record, or its
 * own.  If another transaction holds the row, it waits for that as an UPDATE
 * does, and then reads, checks and computes again: a claim can have expired
 * meanwhile, and a lease begins when it is written.  So if a holder wakes up
 * while its successor's takeover is uncommitted, it is refused if the
 * takeover commits, and succeeds if the takeover is rolled back.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "keys/claim_holder.h"
#include "keys/key_record.h"
#include "stats/stats.h"
#include "store/pg_sequence.h"
#include "util/arguments.h"
#include "util/commit_notify.h"
#include "util/client_text.h"
#include "util/compat.h"
#include "util/errors.h"
#include "util/settings.h"
#include "util/texts.h"
#include "util/times.h"

/* The HTTP status codes that a response can have. */
#define MIN_STATUS	100
#define MAX_STATUS	599

/*
 * The claim tokens that this transaction has taken, in ascending order.  They
 * belong to the transaction "claims_lxid" and are void in any other.  Tokens
 * of claims that were rolled back to a savepoint stay in the array, without
 * effect: their rows are gone, and no token is given twice.
 */
static LocalTransactionId claims_lxid = InvalidLocalTransactionId;
static int64 *claims = NULL;
static int	num_claims = 0;
static int	max_claims = 0;

static bool claimed_here(int64 token);
static bool complete(FunctionCallInfo fcinfo, IdemResponse *response);
static Datum renew_lease(FunctionCallInfo fcinfo, const Datum *key,
						 IdemKeyRecord *change, int lease_arg,
						 int token_arg_number);
static bool change_claim(IdemCursor *cursor, const Datum *key,
						 const int64 *token, IdemKeyRecord *change,
						 IdemKeyState end, const Interval *lease);
static IdemKeyState check_claim(IdemCursor *cursor, bool found,
								const Datum *key, const int64 *token,
								TimestampTz now);
pg_noreturn static void claim_not_found(Datum key, const char *state);
static Datum optional_arg(FunctionCallInfo fcinfo, int n);
static int64 *token_arg(FunctionCallInfo fcinfo, int n, int64 *token);

/*
 * Remember that the current transaction has taken a claim.
 */
void
idem_remember_claim(int64 token)
{
	int			i;

	if (claims_lxid != IdemLocalTransactionId())
	{
		claims_lxid = IdemLocalTransactionId();
		num_claims = 0;
	}
	if (num_claims == max_claims)
	{
		int			size = Max(64, max_claims * 2);

		if (claims == NULL)
			claims = MemoryContextAlloc(TopMemoryContext,
										size * sizeof(int64));
		else
			claims = repalloc_huge(claims, size * sizeof(int64));
		max_claims = size;
	}

	/* Tokens ascend, unless a sequence was set back. */
	for (i = num_claims++; i > 0 && claims[i - 1] > token; i--)
		claims[i] = claims[i - 1];
	claims[i] = token;
}

/*
 * Has the current transaction taken the claim with this token?
 */
static bool
claimed_here(int64 token)
{
	int			low = 0;
	int			high = num_claims;

	if (claims_lxid != IdemLocalTransactionId())
		return false;
	while (low < high)
	{
		int			middle = low + (high - low) / 2;

		if (claims[middle] < token)
			low = middle + 1;
		else
			high = middle;
	}
	return low < num_claims && claims[low] == token;
}

/*
 * idem_complete(scope, key, response_status, response_body text,
 *				 response_headers, claim_token) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_complete_text);
Datum
idem_complete_text(PG_FUNCTION_ARGS)
{
	IdemResponse response = {0};

	response.body = optional_arg(fcinfo, 3);
	PG_RETURN_BOOL(complete(fcinfo, &response));
}

/*
 * idem_complete(scope, key, response_status, response_body bytea,
 *				 response_headers, claim_token) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_complete_bytea);
Datum
idem_complete_bytea(PG_FUNCTION_ARGS)
{
	IdemResponse response = {0};

	response.bytes = optional_arg(fcinfo, 3);
	PG_RETURN_BOOL(complete(fcinfo, &response));
}

/*
 * The common part of the two: all but the body.
 */
static bool
complete(FunctionCallInfo fcinfo, IdemResponse *response)
{
	Datum		key[2];
	int64		token;

	idem_writer_key_args(fcinfo, key);
	response->status = DatumGetInt32(idem_required_arg(fcinfo, 2,
													   "response_status"));
	response->headers = optional_arg(fcinfo, 4);
	return idem_complete_claim(key, response, token_arg(fcinfo, 5, &token));
}

/*
 * Store the response of a claimed request.  "token" can be NULL for a claim
 * of this transaction.  Returns false if this claim has been completed
 * before.  Raises ID003, ID004, 54000, and 22023 for a status that is not an
 * HTTP status.
 */
bool
idem_complete_claim(const Datum *key, const IdemResponse *response,
					const int64 *token)
{
	IdemCursor	keys;
	bool		completed;

	idem_cursor_open(&keys, IDEM_KEYS, RowExclusiveLock);
	completed = idem_complete_in(&keys, key, response, token);
	idem_cursor_close(&keys);
	return completed;
}

/*
 * The same, with idem_keys open already.
 */
bool
idem_complete_in(IdemCursor *cursor, const Datum *key,
				 const IdemResponse *response, const int64 *token)
{
	IdemKeyRecord change;

	if (response->status < MIN_STATUS || response->status > MAX_STATUS)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("response status %d is out of range",
						response->status),
				 errhint("Pass an HTTP status code from %d to %d.",
						 MIN_STATUS, MAX_STATUS)));
	memset(&change, 0, sizeof(change));
	idem_record_set(&change, KEYS_STATE, idem_state_datum(IDEM_STATE_COMPLETED));
	idem_record_set(&change, KEYS_RESPONSE_STATUS,
					Int32GetDatum(response->status));
	idem_record_set_or_null(&change, KEYS_RESPONSE_HEADERS,
							idem_check_size(response->headers, "response_headers"));
	idem_record_set_or_null(&change, KEYS_RESPONSE_BODY,
							idem_check_size(response->body, "response_body"));
	idem_record_set_or_null(&change, KEYS_RESPONSE_BYTES,
							idem_check_size(response->bytes, "response_body"));
	if (!change_claim(cursor, key, token, &change, IDEM_STATE_COMPLETED,
					  NULL))
		return false;
	idem_count(IDEM_COUNT_COMPLETIONS, 1);
	return true;
}

/*
 * idem_fail(scope, key, error, claim_token) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_fail);
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemKeyRecord change;
	int64		token;
	IdemCursor	keys;
	bool		changed;

	idem_writer_key_args(fcinfo, key);
	memset(&change, 0, sizeof(change));
	idem_record_set(&change, KEYS_STATE, idem_state_datum(IDEM_STATE_FAILED));
	if (!PG_ARGISNULL(2))
		idem_record_set(&change, KEYS_ERROR,
						idem_clip_text(PG_GETARG_DATUM(2)));
	idem_cursor_open(&keys, IDEM_KEYS, RowExclusiveLock);
	changed = change_claim(&keys, key, token_arg(fcinfo, 3, &token), &change,
						   IDEM_STATE_FAILED, NULL);
	idem_cursor_close(&keys);
	if (changed)
		idem_count(IDEM_COUNT_FAILURES, 1);
	PG_RETURN_BOOL(changed);
}

/*
 * idem_checkpoint(scope, key, recovery_point, recovery_state, lease,
 *				   claim_token) -> timestamptz
 */
PG_FUNCTION_INFO_V1(idem_checkpoint);
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemKeyRecord change;

	idem_writer_key_args(fcinfo, key);
	memset(&change, 0, sizeof(change));
	idem_record_set(&change, KEYS_RECOVERY_POINT,
					idem_check_client_text(idem_name_arg(fcinfo, 2, "recovery_point")));
	idem_record_set_or_null(&change, KEYS_RECOVERY_STATE,
							idem_check_client_text(idem_check_size(optional_arg(fcinfo, 3), "recovery_state")));
	PG_RETURN_DATUM(renew_lease(fcinfo, key, &change, 4, 5));
}

/*
 * idem_heartbeat(scope, key, lease, claim_token) -> timestamptz
 */
PG_FUNCTION_INFO_V1(idem_heartbeat);
Datum
idem_heartbeat(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemKeyRecord change;

	idem_writer_key_args(fcinfo, key);
	memset(&change, 0, sizeof(change));
	PG_RETURN_DATUM(renew_lease(fcinfo, key, &change, 2, 3));
}

/*
 * Apply a change that keeps the claim, and begin a new lease.  Returns its
 * end.
 */
static Datum
renew_lease(FunctionCallInfo fcinfo, const Datum *key, IdemKeyRecord *change,
			int lease_arg, int token_arg_number)
{
	Interval   *lease = idem_interval_arg(fcinfo, lease_arg, "lease");
	int64		token;
	IdemCursor	keys;

	idem_cursor_open(&keys, IDEM_KEYS, RowExclusiveLock);
	(void) change_claim(&keys, key,
						token_arg(fcinfo, token_arg_number, &token), change,
						IDEM_STATE_STARTED, lease);
	idem_cursor_close(&keys);
	return change->values[KEYS_LEASE_EXPIRES_AT];
}

/*
 * idem_release(scope, key, claim_token) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_release);
Datum
idem_release(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	int64		token_value;
	int64	   *token = token_arg(fcinfo, 2, &token_value);
	IdemCursor	cursor;

	idem_writer_key_args(fcinfo, key);
	idem_cursor_open(&cursor, IDEM_KEYS, RowExclusiveLock);
	for (;;)
	{
		bool		found;
		IdemKeyState state;
		IdemWrite	written;

		CHECK_FOR_INTERRUPTS();
		found = idem_find_latest(&cursor, key, NULL);

		/*
		 * The token was given, but its record is gone: most likely the claim
		 * was released before, and the answer was lost.
		 */
		if (!found && token != NULL &&
			*token > 0 && *token <= idem_sequence_last(IDEM_CLAIM_TOKENS))
		{
			idem_cursor_close(&cursor);
			PG_RETURN_BOOL(false);
		}

		state = check_claim(&cursor, found, key, token, GetCurrentTimestamp());
		if (state != IDEM_STATE_STARTED)
			claim_not_found(key[1], idem_state_names[state]);
		written = idem_delete(&cursor, false);
		if (written == IDEM_WRITE_DONE)
			break;
		if (written == IDEM_WRITE_HELD)
			idem_wait(&cursor);
	}
	idem_notify_claim_end(key);
	idem_log_key_event(IDEM_EVENT_RELEASED, cursor.row->tts_values);
	idem_cursor_close(&cursor);
	PG_RETURN_BOOL(true);
}

/*
 * Apply a change to a live claim, which brings it into state "end".
 * IDEM_STATE_STARTED begins a new lease.
 *
 * Returns false, having changed nothing, if this claim was brought to that
 * end before.  Raises ID003 if the token is not the current one, and ID004 if
 * there is no live claim.
 */
static bool
change_claim(IdemCursor *cursor, const Datum *key, const int64 *token,
			 IdemKeyRecord *change, IdemKeyState end, const Interval *lease)
{
	IdemWrite	written;
	bool		found;

	do
	{
		TimestampTz now;
		IdemKeyState state;

		CHECK_FOR_INTERRUPTS();
		found = idem_find_latest(cursor, key, NULL);
		now = GetCurrentTimestamp();
		state = check_claim(cursor, found, key, token, now);
		if (state != IDEM_STATE_STARTED)
		{
			if (state != end &&
				!(state == IDEM_STATE_ERASED && end == IDEM_STATE_COMPLETED))
				claim_not_found(key[1], idem_state_names[state]);
			return false;
		}

		if (end == IDEM_STATE_COMPLETED)
			idem_record_set(change, KEYS_COMPLETED_AT,
							TimestampTzGetDatum(now));
		if (end == IDEM_STATE_STARTED)
			idem_record_set(change, KEYS_LEASE_EXPIRES_AT,
							TimestampTzGetDatum(idem_add_interval(now, lease,
																  idem_default_lease)));
		else
			idem_record_set_or_null(change, KEYS_LEASE_EXPIRES_AT, (Datum) 0);
		/* A completed request is replayed, and cannot be resumed. */
		if (end == IDEM_STATE_COMPLETED)
			idem_record_set_or_null(change, KEYS_REQUEST, (Datum) 0);
		idem_record_keep(change, cursor);
		idem_record_set_resume_at(change, end, now);

		/* No other transaction can hold our own row. */
		written = idem_update(cursor, change->values, change->nulls,
							  cursor->row_is_own);
		if (written == IDEM_WRITE_HELD)
			idem_wait(cursor);
	} while (written != IDEM_WRITE_DONE);

	if (end != IDEM_STATE_STARTED)
	{
		idem_notify_claim_end(key);
		if (!change->nulls[KEYS_RESUME_AT])
		{
			Datum		resumable[2];

			idem_resumable_key(resumable, (Datum) 0);
			idem_notify_claim_end(resumable);
			idem_resumable_key(resumable, key[0]);
			idem_notify_claim_end(resumable);
		}
		idem_log_key_event(end == IDEM_STATE_COMPLETED ?
						   IDEM_EVENT_COMPLETED : IDEM_EVENT_FAILED,
						   change->values);
	}
	return true;
}

/*
 * Check that a record was found, is live, and belongs to the holder of this
 * token or, if "token" is NULL, to this transaction.  Returns its state.
 *
 * Raises ID004 if there is no live record, ID003 if it belongs to another
 * claim, ID001 for a key that cannot have a record.
 */
static IdemKeyState
check_claim(IdemCursor *cursor, bool found, const Datum *key,
			const int64 *token, TimestampTz now)
{
	int64		current;
	bool		holds;

	if (!found)
		idem_check_new_key(key[1]);
	if (!found || idem_found_is_expired(cursor, now))
		claim_not_found(key[1], NULL);

	current = DatumGetInt64(cursor->row->tts_values[KEYS_CLAIM_TOKEN]);
	holds = token != NULL ? *token == current :
		cursor->row_is_own && claimed_here(current);
	if (!holds)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_CLAIM_LOST),
				 token == NULL ?
				 errmsg("claim token required for idempotency key %s",
						idem_redacted_key(key[1])) :
				 errmsg("claim of idempotency key %s has been lost",
						idem_redacted_key(key[1])),
				 token == NULL ?
				 errdetail("The key was not claimed by this transaction.") :
				 errdetail("The claim token is not the current one."),
				 token == NULL ?
				 errhint("Pass the claim_token that idem_claim() returned. Without it, claim and complete in one transaction, which is on one connection.") :
				 errhint("Stop the work: its lease has expired, and another claimant has taken over.")));
	return idem_found_state(cursor);
}

/*
 * Report that there is no live claim: there is no live record, or it has
 * another state.
 */
static void
claim_not_found(Datum key, const char *state)
{
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_CLAIM_NOT_FOUND),
			 errmsg("no live claim of idempotency key %s", idem_redacted_key(key)),
			 state == NULL ?
			 errdetail("It was never claimed, has expired or was released.") :
			 errdetail("Its state is \"%s\".", state),
			 errhint("Claim the key with idem_claim() first, in this transaction or in one that has committed.")));
}

static Datum
optional_arg(FunctionCallInfo fcinfo, int n)
{
	return PG_ARGISNULL(n) ? (Datum) 0 : PG_GETARG_DATUM(n);
}

/*
 * Raise 54000 if a value is too large to be stored.  "name" is its name in
 * the message.
 */
Datum
idem_check_size(Datum value, const char *name)
{
	Size		size;

	if (DatumGetPointer(value) == NULL)
		return value;

	size = toast_raw_datum_size(value) - VARHDRSZ;
	if (size > (Size) idem_max_response_size)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("argument \"%s\" is too large", name),
				 errdetail("It has %zu bytes, %d are allowed.",
						   size, idem_max_response_size),
				 errhint("Store a reference to it, or let a superuser raise \"%s\".",
						 "idempotency.max_response_size")));
	return value;
}

/*
 * Return argument "n", a claim token, through "token"; NULL if it is not
 * given.
 */
static int64 *
token_arg(FunctionCallInfo fcinfo, int n, int64 *token)
{
	if (PG_ARGISNULL(n))
		return NULL;
	*token = PG_GETARG_INT64(n);
	return token;
}
