/*-------------------------------------------------------------------------
 *
 * request_hash.c
 *		The request hash: SHA-256 over "METHOD:path:body".
 *
 * The method is in ASCII upper case, and each ":" in the path is "%3A", so
 * that only equal requests give the same string: "/a:b" and "/a%3Ab" are the
 * same path.  A JSON body is in canonical form (canonical_json.c); any other
 * body is taken byte for byte.  No body and an empty one are the empty
 * string.  All text is UTF-8 in any database encoding, so that a service
 * outside the database gets the same hash for the same request.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/jsonapi.h"
#include "common/sha2.h"
#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "hash/canonical_json.h"
#include "hash/request_hash.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/sha256.h"

static Datum parse_body(char *json);
pg_noreturn static void raise_without_body(int sqlstate, char *json);
static void begin_request(StringInfo request, FunctionCallInfo fcinfo);
static void append_method(StringInfo request, const char *method, int length);
static void append_path(StringInfo request, const char *path, int length);
static bytea *hash_request(StringInfo request);

/*
 * idem_request_hash(method, path, body text) -> bytea
 *
 * The body is JSON, or empty.  Raises 22P02 (or another code of jsonb input)
 * for any other text, without quoting it.
 */
PG_FUNCTION_INFO_V1(idem_request_hash_text);
Datum
idem_request_hash_text(PG_FUNCTION_ARGS)
{
	StringInfoData request;
	text	   *body = PG_ARGISNULL(2) ? NULL : PG_GETARG_TEXT_PP(2);

	begin_request(&request, fcinfo);
	if (body != NULL && VARSIZE_ANY_EXHDR(body) > 0)
	{
		Datum		document = parse_body(text_to_cstring(body));

		idem_append_canonical_json(&request, DatumGetJsonbP(document));
	}
	PG_RETURN_BYTEA_P(hash_request(&request));
}

/*
 * Convert JSON text to jsonb.
 *
 * The server's own errors quote the text in DETAIL and CONTEXT, and errors go
 * to the server log, where a request body must not appear.  The errors raised
 * here have the same SQLSTATEs, and a position instead of the quote.
 */
static Datum
parse_body(char *json)
{
	MemoryContext context = CurrentMemoryContext;
	Datum volatile document = (Datum) 0;

	PG_TRY();
	{
		document = DirectFunctionCall1(jsonb_in, CStringGetDatum(json));
	}
	PG_CATCH();
	{
		int			sqlstate = geterrcode();

		if (ERRCODE_TO_CATEGORY(sqlstate) != ERRCODE_DATA_EXCEPTION)
			PG_RE_THROW();
		MemoryContextSwitchTo(context);
		FlushErrorState();
		raise_without_body(sqlstate, json);
	}
	PG_END_TRY();
	return document;
}

/*
 * Raise an error of class 22 about a body, without the body.
 */
static void
raise_without_body(int sqlstate, char *json)
{
	JsonLexContext *lex;
	int			line = 1;
	int			column = 1;

	lex = makeJsonLexContextCstringLen(NULL, json, strlen(json),
									   GetDatabaseEncoding(), true);
	if (pg_parse_json(lex, &nullSemAction) == JSON_SUCCESS)
		ereport(ERROR,
				(errcode(sqlstate),
				 errmsg("request body has a value that jsonb cannot hold"),
				 errhint("Hash the body as bytea, byte for byte.")));

	/* At the end of the text, there is no token. */
	for (const char *c = json;
		 *c != '\0' && (lex->token_start == NULL || c < lex->token_start);
		 c += pg_mblen(c))
	{
		column = *c == '\n' ? 1 : column + 1;
		line += *c == '\n';
	}
	ereport(ERROR,
			(errcode(sqlstate),
			 sqlstate == ERRCODE_INVALID_TEXT_REPRESENTATION ?
			 errmsg("request body is not JSON") :
			 errmsg("request body has a character that this database cannot hold"),
			 errdetail("The parser stopped at line %d, character %d.",
					   line, column),
			 errhint("Send JSON, or hash the body as bytea, byte for byte.")));
}

/*
 * idem_request_hash(method, path, body jsonb) -> bytea
 */
PG_FUNCTION_INFO_V1(idem_request_hash_jsonb);
Datum
idem_request_hash_jsonb(PG_FUNCTION_ARGS)
{
	StringInfoData request;

	begin_request(&request, fcinfo);
	if (!PG_ARGISNULL(2))
		idem_append_canonical_json(&request, PG_GETARG_JSONB_P(2));
	PG_RETURN_BYTEA_P(hash_request(&request));
}

/*
 * idem_request_hash(method, path, body bytea) -> bytea
 */
PG_FUNCTION_INFO_V1(idem_request_hash_bytea);
Datum
idem_request_hash_bytea(PG_FUNCTION_ARGS)
{
	StringInfoData request;

	begin_request(&request, fcinfo);
	if (!PG_ARGISNULL(2))
	{
		bytea	   *body = PG_GETARG_BYTEA_PP(2);

		appendBinaryStringInfo(&request, VARDATA_ANY(body),
							   VARSIZE_ANY_EXHDR(body));
	}
	PG_RETURN_BYTEA_P(hash_request(&request));
}

/*
 * idem_canonical_json(document) -> text
 */
PG_FUNCTION_INFO_V1(idem_canonical_json);
Datum
idem_canonical_json(PG_FUNCTION_ARGS)
{
	StringInfoData canonical;
	char	   *converted;

	initStringInfo(&canonical);
	idem_append_canonical_json(&canonical, PG_GETARG_JSONB_P(0));
	converted = pg_any_to_server(canonical.data, canonical.len, PG_UTF8);
	if (converted != canonical.data)
		PG_RETURN_TEXT_P(cstring_to_text(converted));
	PG_RETURN_TEXT_P(cstring_to_text_with_len(canonical.data, canonical.len));
}

/*
 * Return the hash of a request with a JSON body, for callers in this
 * extension.
 */
bytea *
idem_hash_json_request(const char *method, const char *path, Jsonb *body)
{
	StringInfoData request;

	initStringInfo(&request);
	append_method(&request, method, strlen(method));
	append_path(&request, path, strlen(path));
	idem_append_canonical_json(&request, body);
	return hash_request(&request);
}

/*
 * Begin the string to be hashed with arguments 0 and 1, method and path.
 *
 * Raises 22004 if one is NULL, because a NULL hash would turn the comparison
 * off.  Raises 22023 if the method is invalid.
 */
static void
begin_request(StringInfo request, FunctionCallInfo fcinfo)
{
	text	   *method;
	text	   *path;

	method = DatumGetTextPP(idem_required_arg(fcinfo, 0, "method"));
	path = DatumGetTextPP(idem_required_arg(fcinfo, 1, "path"));

	initStringInfo(request);
	append_method(request, VARDATA_ANY(method), VARSIZE_ANY_EXHDR(method));
	append_path(request, VARDATA_ANY(path), VARSIZE_ANY_EXHDR(path));
}

/*
 * Append a method in upper case.  It must be a token (RFC 9110, 5.6.2).
 */
static void
append_method(StringInfo request, const char *method, int length)
{
	for (int i = 0; i < length; i++)
	{
		char		c = method[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
			  (c >= '0' && c <= '9') ||
			  (c != '\0' && strchr("!#$%&'*+-.^_`|~", c) != NULL)))
			break;
		appendStringInfoChar(request, pg_ascii_toupper((unsigned char) c));
	}
	if (length == 0 || request->len != length)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid HTTP method"),
				 errhint("Pass GET, POST, PUT or another token of letters, digits and !#$%%&'*+-.^_`|~ characters.")));
	appendStringInfoChar(request, ':');
}

/*
 * Append a path in UTF-8, with no ":" in it.
 */
static void
append_path(StringInfo request, const char *path, int length)
{
	char	   *utf8 = pg_server_to_any(path, length, PG_UTF8);

	if (utf8 != path)
		length = strlen(utf8);
	for (int i = 0; i < length; i++)
	{
		if (utf8[i] == ':')
			appendBinaryStringInfo(request, "%3A", 3);
		else
			appendStringInfoChar(request, utf8[i]);
	}
	appendStringInfoChar(request, ':');
}

static bytea *
hash_request(StringInfo request)
{
	bytea	   *result = palloc(VARHDRSZ + PG_SHA256_DIGEST_LENGTH);

	idem_sha256(request->data, request->len, (uint8 *) VARDATA(result));
	SET_VARSIZE(result, VARHDRSZ + PG_SHA256_DIGEST_LENGTH);
	return result;
}
