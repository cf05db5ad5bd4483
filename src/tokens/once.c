/*-------------------------------------------------------------------------
 *
 * once.c
 *		Once-only tokens: form tokens, and the inbox.
 *
 * A row of idem_tokens says that a token was used, until it expires.  The
 * call that inserts it, or renews an expired one, is the first.  Other calls
 * wait while the first call's transaction is open, because it might be rolled
 * back.  After any wait they look again, and a token's lifetime begins then.
 *
 * idem_once_many() visits the tokens in their sort order, so that two
 * consumers of the same batch cannot deadlock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "stats/stats.h"
#include "store/store.h"
#include "util/arguments.h"
#include "util/arrays.h"
#include "util/compat.h"
#include "util/pinned_scope.h"
#include "util/settings.h"
#include "util/texts.h"
#include "util/timed_lock.h"
#include "util/times.h"

/* The columns of idem_tokens, in order. */
enum
{
	TOKENS_EXPIRES_AT,
	TOKENS_USED_AT,
	TOKENS_SCOPE,
	TOKENS_TOKEN,
	TOKENS_NUM_COLUMNS,
};

static bool use_token(IdemCursor *tokens, const Datum *key,
					  const Interval *ttl, bool *insert_first);

/*
 * idem_once(scope, token, ttl) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_once);
Datum
idem_once(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	Interval   *ttl;
	IdemCursor	tokens;
	bool		insert_first = false;
	bool		first;

	key[0] = idem_name_arg(fcinfo, 0, "scope");
	idem_check_pin(key[0]);
	key[1] = idem_name_arg(fcinfo, 1, "token");
	ttl = idem_interval_arg(fcinfo, 2, "ttl");

	idem_cursor_open(&tokens, IDEM_TOKENS, RowExclusiveLock);
	first = use_token(&tokens, key, ttl, &insert_first);
	idem_count(first ? IDEM_COUNT_ONCE_FIRST : IDEM_COUNT_ONCE_SEEN, 1);
	idem_cursor_close(&tokens);
	PG_RETURN_BOOL(first);
}

/*
 * idem_once_many(scope, tokens, ttl) -> setof text
 */
PG_FUNCTION_INFO_V1(idem_once_many);
Datum
idem_once_many(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemArray	array = {.name = "tokens"};
	Interval   *ttl;
	IdemBatchIterator batch;
	bool	   *first;
	int			nfirst = 0;
	IdemCursor	tokens;
	bool		insert_first;
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	key[0] = idem_name_arg(fcinfo, 0, "scope");
	idem_check_pin(key[0]);
	array.length = idem_text_array(idem_required_arg(fcinfo, 1, array.name),
								   array.name, &array.values);
	ttl = idem_interval_arg(fcinfo, 2, "ttl");

	/* SERIALIZABLE needs the find for its predicate locks. */
	insert_first = !IsolationIsSerializable();
	first = palloc0_array(bool, array.length);
	key[1] = (Datum) 0;

	idem_cursor_open(&tokens, IDEM_TOKENS, RowExclusiveLock);
	idem_batch_begin(&batch, &array, 1, array.length);
	while (idem_batch_next(&batch))
	{
		int			i = batch.element.index;

		/* Of equal tokens, the first in the array counts. */
		if (DatumGetPointer(key[1]) != NULL &&
			idem_text_compare(key[1], array.values[i]) == 0)
			continue;
		key[1] = array.values[i];
		first[i] = use_token(&tokens, key, ttl, &insert_first);
		IDEM_INJECTION_POINT("idem-once-token");
	}
	idem_cursor_close(&tokens);

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	for (int i = 0; i < array.length; i++)
	{
		bool		isnull = false;

		CHECK_FOR_INTERRUPTS();
		if (!first[i])
			continue;
		nfirst++;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 &array.values[i], &isnull);
	}
	idem_count(IDEM_COUNT_ONCE_FIRST, nfirst);
	idem_count(IDEM_COUNT_ONCE_SEEN, array.length - nfirst);
	return (Datum) 0;
}

/*
 * Use a token.  Returns whether this is the first time.
 *
 * "insert_first" assumes that the token is new, which saves the search.  If
 * it is not new, that costs a dead tuple, and the flag is cleared.
 */
static bool
use_token(IdemCursor *tokens, const Datum *key, const Interval *ttl,
		  bool *insert_first)
{
	for (bool again = false;; again = true)
	{
		IdemFind	found = IDEM_FIND_NONE;
		TimestampTz now;
		Datum		expires_at;
		Datum		values[TOKENS_NUM_COLUMNS];
		bool		nulls[TOKENS_NUM_COLUMNS] = {0};

		CHECK_FOR_INTERRUPTS();
		if (again)
			idem_check_client();
		if (!*insert_first)
			found = idem_find(tokens, key);
		if (found == IDEM_FIND_PENDING)
		{
			idem_wait(tokens);
			continue;
		}

		now = GetCurrentTimestamp();
		if (found == IDEM_FIND_ROW)
		{
			expires_at = tokens->row->tts_values[TOKENS_EXPIRES_AT];
			if (DatumGetTimestampTz(expires_at) > now)
				return false;
		}

		values[TOKENS_EXPIRES_AT] =
			TimestampTzGetDatum(idem_add_interval(now, ttl, idem_token_ttl));
		values[TOKENS_USED_AT] = TimestampTzGetDatum(now);
		values[TOKENS_SCOPE] = key[0];
		values[TOKENS_TOKEN] = key[1];
		if (found == IDEM_FIND_NONE)
		{
			if (idem_insert(tokens, values, nulls))
				return true;
			*insert_first = false;
		}
		else
		{
			IdemWrite	result = idem_update(tokens, values, nulls, false);

			if (result == IDEM_WRITE_DONE)
				return true;
			if (result == IDEM_WRITE_HELD)
				idem_wait(tokens);
		}
	}
}

/*
 * idem_once_at(scope, token) -> timestamptz
 */
PG_FUNCTION_INFO_V1(idem_once_at);
Datum
idem_once_at(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	IdemCursor	tokens;
	bool		found;
	Datum		used_at = (Datum) 0;

	key[0] = idem_name_arg(fcinfo, 0, "scope");
	key[1] = idem_name_arg(fcinfo, 1, "token");

	idem_cursor_open(&tokens, IDEM_TOKENS, AccessShareLock);
	found = idem_find_visible(&tokens, key, GetActiveSnapshot());
	if (found)
	{
		Datum	   *values = tokens.row->tts_values;

		used_at = values[TOKENS_USED_AT];
		found = DatumGetTimestampTz(values[TOKENS_EXPIRES_AT]) >
			GetCurrentTimestamp();
	}
	idem_cursor_close(&tokens);
	if (!found)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(used_at);
}
