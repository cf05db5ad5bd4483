/*-------------------------------------------------------------------------
 *
 * client_text.c
 *		Checking that a value can be sent to a client.
 *
 * If one value cannot be sent, a call that returns the rows of many users
 * fails as a whole, each time again, and nobody gets anything.  So the values
 * that such calls return are checked before they are stored: they must not be
 * too long as text, and must have a representation in UTF-8, which the
 * clients use.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"

#include "util/client_text.h"
#include "util/compat.h"

/*
 * A byte of jsonb becomes at most this many bytes of text: a number of 16
 * bytes can have 131,072 digits before the point, and 16,383 after it.
 */
#define MAX_GROWTH		10000

/* The limit for a small document. */
#define MIN_TEXT_LIMIT	(4 * 1024 * 1024)

/*
 * Strings shorter than SHORT_STRING are assumed to consist of escaped
 * characters only, unless that could decide.
 */
#define SHORT_STRING	1024
#define MAX_ESCAPE		6

static int64 text_size(Jsonb *json, int64 limit, int short_string);
static int64 string_size(const char *string, int length, int short_string);
static void check_encoding(const char *string, int length);

/*
 * Return the maximum length of a document of this size as text: "maximum",
 * and at most ten times the size, which only numbers with long rows of zeros
 * exceed.  Without the latter, a tenant could make the server write megabytes
 * for each kilobyte that is published.  0 if no document of this size can be
 * too long.
 */
int64
idem_json_text_limit(Size size, int64 maximum)
{
	int64		limit = Min(maximum, Max(MIN_TEXT_LIMIT, (int64) size * 10));

	return size <= limit / MAX_GROWTH ? 0 : limit;
}

/*
 * Return the length of a document as text, in bytes: an estimate that is
 * never too low.  If it exceeds "limit", any number above the limit.
 */
int64
idem_json_text_size(Datum json, int64 limit)
{
	Jsonb	   *detoasted = DatumGetJsonbP(json);
	int64		size = text_size(detoasted, limit, SHORT_STRING);

	if (size > limit)
		size = text_size(detoasted, limit, 0);
	if ((Pointer) detoasted != DatumGetPointer(json))
		pfree(detoasted);
	return size;
}

/*
 * The same, without reading strings shorter than "short_string".
 */
static int64
text_size(Jsonb *json, int64 limit, int short_string)
{
	int64		size = 0;
	JsonbIterator *iterator = JsonbIteratorInit(&json->root);
	JsonbIteratorToken token;
	JsonbValue	value;

	while (size <= limit &&
		   (token = JsonbIteratorNext(&iterator, &value, false)) != WJB_DONE)
	{
		size += 4;
		if (token != WJB_KEY && token != WJB_VALUE && token != WJB_ELEM)
			continue;
		CHECK_FOR_INTERRUPTS();
		if (value.type == jbvString)
			size += string_size(value.val.string.val, value.val.string.len,
								short_string);
		else if (value.type == jbvNumeric)
		{
			char	   *digits = DatumGetCString(DirectFunctionCall1(numeric_out,
																	 NumericGetDatum(value.val.numeric)));

			size += strlen(digits);
			pfree(digits);
		}
		else
			size += strlen("false");
	}
	return size;
}

/*
 * The same for a string, without its quotes.
 */
static int64
string_size(const char *string, int length, int short_string)
{
	int64		size = length;

	if (length < short_string)
		return size * MAX_ESCAPE;
	for (int i = 0; i < length; i++)
	{
		if ((unsigned char) string[i] < ' ')
			size += MAX_ESCAPE - 1;
		else if (string[i] == '"' || string[i] == '\\')
			size++;
	}
	return size;
}

/*
 * Raise 22P05 or 22021 for a document with a character that cannot be
 * converted to UTF-8.  Returns the document.
 */
Datum
idem_check_client_json(Datum json)
{
	if (GetDatabaseEncoding() != PG_UTF8 && DatumGetPointer(json) != NULL)
	{
		Jsonb	   *detoasted = DatumGetJsonbP(json);
		StringInfoData string;

		initStringInfo(&string);
		(void) JsonbToCString(&string, &detoasted->root, VARSIZE(detoasted));
		check_encoding(string.data, string.len);
		pfree(string.data);
	}
	return json;
}

/*
 * The same for a text.
 */
Datum
idem_check_client_text(Datum value)
{
	if (GetDatabaseEncoding() != PG_UTF8 && DatumGetPointer(value) != NULL)
	{
		text	   *string = DatumGetTextPP(value);

		check_encoding(VARDATA_ANY(string), VARSIZE_ANY_EXHDR(string));
	}
	return value;
}

static void
check_encoding(const char *string, int length)
{
	char	   *utf8 = pg_server_to_any(string, length, PG_UTF8);

	if (utf8 != string)
		pfree(utf8);
}
