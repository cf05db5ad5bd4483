/*-------------------------------------------------------------------------
 *
 * harness.c
 *		Canonical JSON and the request hash under libFuzzer.
 *
 * A module of its own with canonical_json.c and request_hash.c; see run.  The
 * fuzzer runs inside a single-user server, so what it calls is the real
 * thing: jsonb, numeric, memory contexts, errors.  Its inputs are JSON texts,
 * and it is guided by what they reach in those two files.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/memutils.h"

#include "util/arguments.h"
#include "hash/canonical_json.h"
#include "util/compat.h"
#include "hash/request_hash.h"

PG_MODULE_MAGIC;

/* The canonical form is at most this number of times as long: 1e20. */
#define MAX_GROWTH	6

/*
 * With blocks so small, chunks of more than 128 bytes come from malloc() one by
 * one, and AddressSanitizer sees where they end.
 */
#define BLOCK_SIZE	1024

/* libFuzzer's own entry; it ends the process. */
extern int	LLVMFuzzerRunDriver(int *argc, char ***argv,
								int (*callback) (const uint8 *, size_t));

static int	try_text(const uint8 *data, size_t size);
static void check_document(Jsonb *document, size_t size);
static Jsonb *parse(const char *json);
pg_noreturn static void report(const char *problem, StringInfo canonical);

/*
 * idem_fuzz(arguments text[]): run libFuzzer with these arguments.
 */
PG_FUNCTION_INFO_V1(idem_fuzz);
Datum
idem_fuzz(PG_FUNCTION_ARGS)
{
	Datum	   *elements;
	int			argc;
	char	  **argv;

	deconstruct_array(PG_GETARG_ARRAYTYPE_P(0), TEXTOID, -1, false,
					  TYPALIGN_INT, &elements, NULL, &argc);
	argv = MemoryContextAllocZero(TopMemoryContext,
								  sizeof(char *) * (argc + 1));
	for (int i = 0; i < argc; i++)
		argv[i] = MemoryContextStrdup(TopMemoryContext,
									  TextDatumGetCString(elements[i]));
	PG_RETURN_INT32(LLVMFuzzerRunDriver(&argc, &argv, try_text));
}

/*
 * For the SQL functions of request_hash.c, which nobody calls here.
 */
Datum
idem_required_arg(FunctionCallInfo fcinfo, int n, const char *name)
{
	elog(ERROR, "not called");
	return (Datum) 0;
}

/*
 * libFuzzer's callback.  Whatever jsonb takes must have a canonical form,
 * unless it is nested too deeply.
 */
static int
try_text(const uint8 *data, size_t size)
{
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext context = AllocSetContextCreate(caller, "fuzz",
												  0, BLOCK_SIZE, BLOCK_SIZE);
	volatile bool parsed = false;

	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		if (pg_verify_mbstr(PG_UTF8, (const char *) data, size, true) &&
			memchr(data, '\0', size) == NULL)
		{
			Jsonb	   *document = parse(pnstrdup((const char *) data, size));

			parsed = true;
			check_document(document, size);
		}
	}
	PG_CATCH();
	{
		if (parsed && geterrcode() != ERRCODE_STATEMENT_TOO_COMPLEX)
			report("an error", NULL);
		FlushErrorState();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(context);
	return 0;
}

/*
 * The canonical form is a fixed point and not much longer than the text of
 * "size" bytes, and the hash is that of this form.
 */
static void
check_document(Jsonb *document, size_t size)
{
	StringInfoData canonical;
	StringInfoData again;
	StringInfoData request;
	bytea	   *hash;
	Datum		expected;

	initStringInfo(&canonical);
	idem_append_canonical_json(&canonical, document);
	if (canonical.len > MAX_GROWTH * size)
		report("too long", &canonical);

	initStringInfo(&again);
	idem_append_canonical_json(&again, parse(canonical.data));
	if (again.len != canonical.len ||
		memcmp(again.data, canonical.data, again.len) != 0)
		report("no fixed point", &canonical);

	initStringInfo(&request);
	appendStringInfo(&request, "POST:/a%%3Ab:%s", canonical.data);
	hash = idem_hash_json_request("post", "/a:b", document);
	expected = DirectFunctionCall1(sha256_bytea,
								   PointerGetDatum(cstring_to_text(request.data)));
	if (!DatumGetBool(DirectFunctionCall2(byteaeq, PointerGetDatum(hash),
										  expected)))
		report("another hash", &canonical);
}

static Jsonb *
parse(const char *json)
{
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in,
											  CStringGetDatum(json)));
}

/*
 * Die, so that libFuzzer keeps the input.
 */
static void
report(const char *problem, StringInfo canonical)
{
	fprintf(stderr, "FAILED: %s: %s\n", problem,
			canonical ? canonical->data : "");
	abort();
}
