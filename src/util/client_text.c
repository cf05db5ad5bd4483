/*-------------------------------------------------------------------------
 *
 * client_text.c
 *		Can a client be sent a value?
 *
 * A call that returns the rows of many users fails as a whole if one value
 * cannot be sent, each time anew, and nobody gets anything any more.  So what
 * such calls return is checked before it is stored: that it is not too long as
 * text, and that it has a form in UTF-8, which the clients use.
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
 * No byte of a jsonb becomes more bytes of text: a number of 16 bytes can have
 * 131,072 digits before the point, and 16,383 behind it.
 */
#define MAX_GROWTH		10000

/* The limit for a small document. */
#define MIN_TEXT_LIMIT	(4 * 1024 * 1024)

/*
 * Shorter strings are taken for ones of characters that are all escaped, unless
 * that might be decisive.
 */
#define SHORT_STRING	1024
#define MAX_ESCAPE		6

static int64 text_size(Jsonb *json, int64 limit, int short_string);
static int64 string_size(const char *string, int length, int short_string);
static void check_encoding(const char *string, int length);

/*
 * How many bytes of text documents of this size can have: "maximum", and ten
 * times the size, which only numbers with long rows of zeros exceed.  Without
 * that, a tenant could make a relay's server write megabytes for each kilobyte
 * that is published.  0 if no document of this size has as many.
 */
int64
idem_json_text_limit(Size size, int64 maximum)
{
	int64		limit = Min(maximum, Max(MIN_TEXT_LIMIT, (int64) size * 10));

	return size <= limit / MAX_GROWTH ? 0 : limit;
}

/*
 * How many bytes a document has as text, about, and never less; or, if that is
 * more than "limit", a number above it.
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
 * The same, where strings shorter than "short_string" are not read.
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
 * The same of a string, without its quotes.
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
 * Raise 22P05 or 22021 for a document with a character that UTF-8 does not
 * have.  Returns the document.
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
