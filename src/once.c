/*-------------------------------------------------------------------------
 *
 * once.c
 *		Once-only tokens: form tokens, and the inbox.
 *
 * A row of idem_tokens says that a token was used, until it expires.  The
 * call that inserts it, or that renews an expired one, is the first.  Others
 * wait while that call's transaction is open, because it may yet abort.  After
 * any wait they look again, and count a token's time from then.
 *
 * idem_once_many() visits the tokens in their sort order, whatever order
 * they came in, so that two consumers of the same batch cannot deadlock.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "nodes/nodeFuncs.h"
#include "nodes/supportnodes.h"
#include "optimizer/optimizer.h"
#include "utils/builtins.h"
#include "utils/selfuncs.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "compat.h"
#include "idempotency.h"
#include "settings.h"
#include "stats.h"
#include "store.h"

/* The columns of idem_tokens, in order. */
enum
{
	TOKENS_EXPIRES_AT,
	TOKENS_SCOPE,
	TOKENS_TOKEN,
	TOKENS_NUM_COLUMNS,
};

/* A token of an array, and what became of it. */
typedef struct TokenSlot
{
	Datum		token;
	bool		first;
} TokenSlot;

static bool use_token(IdemTable *tokens, const Datum *key,
					  const Interval *ttl, bool *insert_first);
static int	compare_tokens(const void *a, const void *b, void *arg);

/*
 * idem_once(scope, token, ttl) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_once);
Datum
idem_once(PG_FUNCTION_ARGS)
{
	Datum		key[2];
	Interval   *ttl;
	IdemTable	tokens;
	bool		insert_first = false;
	bool		first;

	key[0] = idem_name_arg(fcinfo, 0, "scope");
	key[1] = idem_name_arg(fcinfo, 1, "token");
	ttl = idem_interval_arg(fcinfo, 2, "ttl");

	idem_table_open(&tokens, IDEM_TOKENS, RowExclusiveLock);
	first = use_token(&tokens, key, ttl, &insert_first);
	idem_count(first ? IDEM_COUNT_ONCE_FIRST : IDEM_COUNT_ONCE_SEEN, 1);
	idem_table_close(&tokens);
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
	Datum	   *elements;
	int			count;
	int			nfirst = 0;
	Interval   *ttl;
	TokenSlot  *slots;
	TokenSlot **sorted;
	IdemTable	tokens;
	bool		insert_first;
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	key[0] = idem_name_arg(fcinfo, 0, "scope");
	count = idem_text_array(idem_required_arg(fcinfo, 1, "tokens"), "tokens",
							&elements);
	ttl = idem_interval_arg(fcinfo, 2, "ttl");

	/* SERIALIZABLE needs the find, for its predicate locks. */
	insert_first = !IsolationIsSerializable();
	slots = palloc0_array(TokenSlot, count);
	sorted = palloc_array(TokenSlot *, count);
	for (int i = 0; i < count; i++)
	{
		slots[i].token = elements[i];
		sorted[i] = &slots[i];
	}
	qsort_interruptible(sorted, count, sizeof(TokenSlot *), compare_tokens,
						NULL);

	idem_table_open(&tokens, IDEM_TOKENS, RowExclusiveLock);
	for (int i = 0; i < count; i++)
	{
		CHECK_FOR_INTERRUPTS();

		/* Of equal tokens, the one that came first counts. */
		if (i > 0 && idem_text_compare(sorted[i]->token,
									   sorted[i - 1]->token) == 0)
			continue;
		key[1] = sorted[i]->token;
		sorted[i]->first = use_token(&tokens, key, ttl, &insert_first);
		IDEM_INJECTION_POINT("idem-once-token");
	}
	idem_table_close(&tokens);

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	for (int i = 0; i < count; i++)
	{
		bool		isnull = false;

		CHECK_FOR_INTERRUPTS();
		if (!slots[i].first)
			continue;
		nfirst++;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 &slots[i].token, &isnull);
	}
	idem_count(IDEM_COUNT_ONCE_FIRST, nfirst);
	idem_count(IDEM_COUNT_ONCE_SEEN, count - nfirst);
	return (Datum) 0;
}

/*
 * idem_once_many_support(internal) -> internal
 *
 * How many rows idem_once_many() returns: as many as its array has elements,
 * so that a batch is joined in the right way.  Where the array comes from
 * another table, the executor may call once for each of its rows, or, with
 * Memoize, keep the answers, which repeats a "first time".  It leaves that
 * where a call returns a single row: then keeping costs more.
 */
PG_FUNCTION_INFO_V1(idem_once_many_support);
Datum
idem_once_many_support(PG_FUNCTION_ARGS)
{
	Node	   *node = (Node *) PG_GETARG_POINTER(0);
	SupportRequestRows *request;
	Node	   *tokens;

	if (!IsA(node, SupportRequestRows))
		PG_RETURN_POINTER(NULL);
	request = (SupportRequestRows *) node;
	if (!is_funcclause(request->node))
		PG_RETURN_POINTER(NULL);

	tokens = lsecond(((FuncExpr *) request->node)->args);
	if (contain_var_clause(tokens))
		request->rows = 1;
	else
	{
		tokens = estimate_expression_value(request->root, tokens);
		request->rows = estimate_array_length(request->root, tokens);
	}
	PG_RETURN_POINTER(request);
}

/*
 * Use a token.  Returns whether this is the first time.
 *
 * With "insert_first" the token is taken for new, which saves a search where
 * it is.  Where it is not, that costs a dead tuple, so the flag is cleared.
 */
static bool
use_token(IdemTable *tokens, const Datum *key, const Interval *ttl,
		  bool *insert_first)
{
	for (;;)
	{
		IdemFind	found = IDEM_FIND_NONE;
		TimestampTz now;
		Datum		expires_at;
		Datum		values[TOKENS_NUM_COLUMNS];
		bool		nulls[TOKENS_NUM_COLUMNS] = {0};

		CHECK_FOR_INTERRUPTS();
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
 * Order tokens by their bytes, equal ones by their place in the array.
 */
static int
compare_tokens(const void *a, const void *b, void *arg)
{
	const TokenSlot *ta = *(const TokenSlot *const *) a;
	const TokenSlot *tb = *(const TokenSlot *const *) b;
	int			order = idem_text_compare(ta->token, tb->token);

	if (order != 0)
		return order;
	return ta < tb ? -1 : 1;
}
