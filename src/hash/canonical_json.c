/*-------------------------------------------------------------------------
 *
 * canonical_json.c
 *		Canonical JSON: the JSON Canonicalization Scheme, RFC 8785.
 *
 * There is no white space.  The members of an object are ordered by the
 * UTF-16 code units of their names (section 3.2.3).  Strings have the few
 * escapes that ECMAScript uses (3.2.2.2).  Numbers are the nearest IEEE
 * double, as ECMAScript writes it (3.2.2.3).  Output is UTF-8 in any database
 * encoding.
 *
 * There is one deliberate difference.  RFC 8785 expects numbers to come from
 * IEEE doubles, but jsonb holds any decimal.  So a number keeps its digits,
 * in the same layout, if it has more than 17 significant digits, if it is an
 * integer that differs from the nearest double, or if it is beyond the range
 * of doubles.  Therefore different amounts look different if they have up to
 * 15 digits or more than 17; with 16 or 17 digits they can be the same
 * double.  On the other hand, a large double that was written with 17 digits
 * keeps them, although RFC 8785 has fewer, and 1e-400 is not 0.
 *
 * Time and space are linear in the size of the document, apart from sorting.
 * A numeric is therefore never printed in full: 1e131071 takes ten bytes
 * here, as it does in the input.  max_stack_depth limits the nesting.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <float.h>
#include <math.h>

#include "common/shortest_dec.h"
#include "libpq/pqformat.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/numeric.h"

#include "hash/canonical_json.h"

/*
 * A nonzero decimal: 0.d1d2d3...  * 10^exponent.  d1 and the last digit are
 * not 0.
 */
typedef struct Decimal
{
	bool		negative;
	int			exponent;
	int			ndigits;
	char	   *digits;
} Decimal;

/* An object's member, its name in UTF-8. */
typedef struct Member
{
	char	   *name;
	int			length;
	JsonbValue	value;
} Member;

/* ECMAScript prints a double with at most this many significant digits. */
#define MAX_DOUBLE_DIGITS	17

/*
 * A decimal with this number of digits survives conversion to a double and
 * back...
 */
#define SAFE_DIGITS			15

/* ... if it is within the normal doubles, 0.1e-306 to 0.9...e+308. */
#define MIN_SAFE_EXPONENT	(-306)
#define MAX_SAFE_EXPONENT	308

static void append_value(StringInfo out, JsonbValue *value);
static void append_container(StringInfo out, JsonbContainer *container);
static void append_array(StringInfo out, JsonbIterator **iterator);
static void append_object(StringInfo out, JsonbIterator **iterator,
						  int nmembers);
static int	compare_members(const void *a, const void *b);
static void append_string(StringInfo out, const char *string, int length);
static void append_number(StringInfo out, Numeric number);
static bool read_numeric(Numeric number, Decimal *decimal);
static double nearest_double(const Decimal *decimal);
static bool equals_double(const Decimal *decimal, double value);
static void shortest_decimal(double value, Decimal *decimal);
static void parse_decimal(const char *string, Decimal *decimal);
static void append_decimal(StringInfo out, const Decimal *decimal);

/*
 * Append the canonical form of a document, in UTF-8.
 *
 * Raises 54001 if it is nested too deeply, 54000 if the result is too long
 * for the server.
 */
void
idem_append_canonical_json(StringInfo out, Jsonb *document)
{
	append_container(out, &document->root);
}

/*
 * Append any value.  A number can take microseconds, and there can be many.
 */
static void
append_value(StringInfo out, JsonbValue *value)
{
	CHECK_FOR_INTERRUPTS();

	switch (value->type)
	{
		case jbvNull:
			appendBinaryStringInfo(out, "null", 4);
			break;
		case jbvBool:
			if (value->val.boolean)
				appendBinaryStringInfo(out, "true", 4);
			else
				appendBinaryStringInfo(out, "false", 5);
			break;
		case jbvString:
			{
				char	   *string = value->val.string.val;
				int			length = value->val.string.len;
				char	   *utf8 = pg_server_to_any(string, length, PG_UTF8);

				append_string(out, utf8,
							  utf8 == string ? length : strlen(utf8));
				break;
			}
		case jbvNumeric:
			append_number(out, value->val.numeric);
			break;
		case jbvBinary:
			append_container(out, value->val.binary.data);
			break;
		default:
			elog(ERROR, "unexpected jsonb value type %d", (int) value->type);
	}
}

/*
 * Append an object, an array, or the scalar that is the whole document.
 */
static void
append_container(StringInfo out, JsonbContainer *container)
{
	JsonbIterator *iterator = JsonbIteratorInit(container);
	JsonbValue	value;

	check_stack_depth();

	switch (JsonbIteratorNext(&iterator, &value, false))
	{
		case WJB_BEGIN_ARRAY:
			if (value.val.array.rawScalar)
			{
				(void) JsonbIteratorNext(&iterator, &value, true);
				append_value(out, &value);
			}
			else
				append_array(out, &iterator);
			break;
		case WJB_BEGIN_OBJECT:
			append_object(out, &iterator, value.val.object.nPairs);
			break;
		default:
			elog(ERROR, "unexpected jsonb container");
	}
}

static void
append_array(StringInfo out, JsonbIterator **iterator)
{
	JsonbValue	value;
	bool		first = true;

	appendStringInfoChar(out, '[');
	while (JsonbIteratorNext(iterator, &value, true) == WJB_ELEM)
	{
		if (!first)
			appendStringInfoChar(out, ',');
		first = false;
		append_value(out, &value);
	}
	appendStringInfoChar(out, ']');
}

static void
append_object(StringInfo out, JsonbIterator **iterator, int nmembers)
{
	Member	   *members = palloc_array(Member, Max(nmembers, 1));
	JsonbValue	name;

	for (int i = 0; i < nmembers; i++)
	{
		(void) JsonbIteratorNext(iterator, &name, true);
		members[i].name = pg_server_to_any(name.val.string.val,
										   name.val.string.len, PG_UTF8);
		members[i].length = members[i].name == name.val.string.val ?
			name.val.string.len : strlen(members[i].name);
		(void) JsonbIteratorNext(iterator, &members[i].value, true);
	}
	qsort(members, nmembers, sizeof(Member), compare_members);

	appendStringInfoChar(out, '{');
	for (int i = 0; i < nmembers; i++)
	{
		if (i > 0)
			appendStringInfoChar(out, ',');
		append_string(out, members[i].name, members[i].length);
		appendStringInfoChar(out, ':');
		append_value(out, &members[i].value);
	}
	appendStringInfoChar(out, '}');
	pfree(members);
}

/*
 * Compare members by the UTF-16 code units of their names.
 *
 * UTF-8 sorts by code point.  UTF-16 differs in one respect: characters from
 * U+10000 on (first byte F0 or above) are written with surrogates, which come
 * before U+E000 to U+FFFF (first byte EE or EF).
 */
static int
compare_members(const void *a, const void *b)
{
	const Member *ma = a;
	const Member *mb = b;
	int			length = Min(ma->length, mb->length);

	CHECK_FOR_INTERRUPTS();

	for (int i = 0; i < length; i++)
	{
		unsigned char ca = ma->name[i];
		unsigned char cb = mb->name[i];

		if (ca == cb)
			continue;
		if (ca >= 0xEE && cb >= 0xEE && (ca >= 0xF0) != (cb >= 0xF0))
			return ca >= 0xF0 ? -1 : 1;
		return ca < cb ? -1 : 1;
	}
	return (ma->length > length) - (mb->length > length);
}

/*
 * Append a string literal; "string" is UTF-8.
 */
static void
append_string(StringInfo out, const char *string, int length)
{
	const char *start = string;
	const char *end = string + length;

	appendStringInfoChar(out, '"');
	for (const char *p = string; p < end; p++)
	{
		unsigned char c = *p;

		if (likely(c >= 0x20 && c != '"' && c != '\\'))
			continue;

		appendBinaryStringInfo(out, start, p - start);
		start = p + 1;
		switch (c)
		{
			case '"':
				appendBinaryStringInfo(out, "\\\"", 2);
				break;
			case '\\':
				appendBinaryStringInfo(out, "\\\\", 2);
				break;
			case '\b':
				appendBinaryStringInfo(out, "\\b", 2);
				break;
			case '\t':
				appendBinaryStringInfo(out, "\\t", 2);
				break;
			case '\n':
				appendBinaryStringInfo(out, "\\n", 2);
				break;
			case '\f':
				appendBinaryStringInfo(out, "\\f", 2);
				break;
			case '\r':
				appendBinaryStringInfo(out, "\\r", 2);
				break;
			default:
				appendStringInfo(out, "\\u%04x", c);
		}
	}
	appendBinaryStringInfo(out, start, end - start);
	appendStringInfoChar(out, '"');
}

/*
 * Append a number: the nearest double as ECMAScript prints it, or its own
 * digits in the cases that the banner lists.
 */
static void
append_number(StringInfo out, Numeric number)
{
	Decimal decimal;
	double		value;

	if (!read_numeric(number, &decimal))
	{
		appendStringInfoChar(out, '0');
		pfree(decimal.digits);
		return;
	}

	if (decimal.ndigits <= MAX_DOUBLE_DIGITS &&
		(decimal.ndigits > SAFE_DIGITS ||
		 decimal.exponent < MIN_SAFE_EXPONENT ||
		 decimal.exponent > MAX_SAFE_EXPONENT))
	{
		value = nearest_double(&decimal);
		if (!isinf(value) && value != 0 &&
			(decimal.ndigits > decimal.exponent ||
			 equals_double(&decimal, value)))
			shortest_decimal(value, &decimal);
	}
	append_decimal(out, &decimal);
	pfree(decimal.digits);
}

/*
 * Split a numeric into digits and exponent.  Returns false for zero.
 *
 * numeric_send() gives the digits without expanding the exponent: groups of
 * four, the first with weight 10000^weight.
 */
static bool
read_numeric(Numeric number, Decimal *decimal)
{
	bytea	   *sent;
	StringInfoData buf;
	int			ngroups;
	int			weight;
	int			sign;
	int			n = 0;
	char	   *digits;
	int			leading;

	sent = DatumGetByteaPP(DirectFunctionCall1(numeric_send,
											   NumericGetDatum(number)));
	buf.data = VARDATA_ANY(sent);
	buf.len = buf.maxlen = VARSIZE_ANY_EXHDR(sent);
	buf.cursor = 0;

	ngroups = (uint16) pq_getmsgint(&buf, 2);
	weight = (int16) pq_getmsgint(&buf, 2);
	sign = (uint16) pq_getmsgint(&buf, 2);
	(void) pq_getmsgint(&buf, 2);	/* display scale */

	digits = palloc(ngroups * 4 + MAX_DOUBLE_DIGITS);
	for (int i = 0; i < ngroups; i++)
	{
		int			group = (int16) pq_getmsgint(&buf, 2);

		digits[n++] = '0' + group / 1000;
		digits[n++] = '0' + group / 100 % 10;
		digits[n++] = '0' + group / 10 % 10;
		digits[n++] = '0' + group % 10;
	}
	pfree(sent);

	while (n > 0 && digits[n - 1] == '0')
		n--;
	for (leading = 0; leading < n && digits[leading] == '0'; leading++)
		;
	memmove(digits, digits + leading, n - leading);

	decimal   ->negative = (sign == 0x4000);
	decimal   ->exponent = 4 * (weight + 1) - leading;
	decimal   ->ndigits = n - leading;
	decimal   ->digits = digits;
	return decimal->ndigits > 0;
}

/*
 * Return the double nearest to a decimal of at most MAX_DOUBLE_DIGITS digits.
 */
static double
nearest_double(const Decimal *decimal)
{
	char		string[MAX_DOUBLE_DIGITS + 32];

	snprintf(string, sizeof(string), "%s.%.*se%d",
			 decimal->negative ? "-" : "",
			 decimal->ndigits, decimal->digits, decimal->exponent);
	return strtod(string, NULL);
}

/*
 * Is an integer exactly this double?  It has at most MAX_DOUBLE_DIGITS
 * significant digits, and the double is the nearest one.
 */
static bool
equals_double(const Decimal *decimal, double value)
{
	char		string[DBL_MAX_10_EXP + 8];
	int			length;

	length = snprintf(string, sizeof(string), "%.0f", fabs(value));
	if (length != decimal->exponent ||
		memcmp(string, decimal->digits, decimal->ndigits) != 0)
		return false;
	for (int i = decimal->ndigits; i < length; i++)
	{
		if (string[i] != '0')
			return false;
	}
	return true;
}

/*
 * Set the decimal that ECMAScript prints for a double (Number::toString): the
 * fewest digits that read back as the same double, and the nearest of those.
 *
 * The server's own shortest output is the same, except that it never uses a
 * decimal exactly half-way between two doubles, which reads back as the even
 * one of them.  Such a decimal of at most 17 digits is an integer of 2^54 or
 * more, and there a search over the lengths is fast enough.
 */
static void
shortest_decimal(double value, Decimal *decimal)
{
	char		string[64];

	if (fabs(value) < 18014398509481984.0)
		string[double_to_shortest_decimal_bufn(value, string)] = '\0';
	else
	{
		for (int ndigits = 1; ndigits <= MAX_DOUBLE_DIGITS; ndigits++)
		{
			snprintf(string, sizeof(string), "%.*e", ndigits - 1, value);
			if (strtod(string, NULL) == value)
				break;
		}
	}
	parse_decimal(string, decimal);
}

/*
 * Read a nonzero decimal, as the C library prints it, into decimal->digits,
 * which has space for MAX_DOUBLE_DIGITS.
 */
static void
parse_decimal(const char *string, Decimal *decimal)
{
	int			point = -1;
	int			exponent = 0;
	int			n = 0;
	int			leading = 0;
	const char *p = string;

	decimal   ->negative = (*p == '-');

	if (*p == '-')
		p++;
	for (; *p != '\0' && *p != 'e'; p++)
	{
		if (*p == '.')
			point = n + leading;
		else if (n == 0 && *p == '0')
			leading++;
		else
			decimal   ->digits[n++] = *p;
	}
	if (point < 0)
		point = n + leading;
	if (*p == 'e')
		exponent = (int) strtol(p + 1, NULL, 10);

	while (n > 0 && decimal->digits[n - 1] == '0')
		n--;
	decimal   ->ndigits = n;
	decimal   ->exponent = exponent + point - leading;
}

/*
 * Append a decimal in the layout of ECMAScript's Number::toString.
 */
static void
append_decimal(StringInfo out, const Decimal *decimal)
{
	const char *digits = decimal->digits;
	int			ndigits = decimal->ndigits;
	int			exponent = decimal->exponent;

	if (decimal->negative)
		appendStringInfoChar(out, '-');

	if (exponent > 21 || exponent <= -6)
	{
		appendStringInfoChar(out, digits[0]);
		if (ndigits > 1)
		{
			appendStringInfoChar(out, '.');
			appendBinaryStringInfo(out, digits + 1, ndigits - 1);
		}
		appendStringInfo(out, "e%+d", exponent - 1);
	}
	else if (exponent <= 0)
	{
		appendBinaryStringInfo(out, "0.", 2);
		for (int i = exponent; i < 0; i++)
			appendStringInfoChar(out, '0');
		appendBinaryStringInfo(out, digits, ndigits);
	}
	else if (exponent >= ndigits)
	{
		appendBinaryStringInfo(out, digits, ndigits);
		for (int i = ndigits; i < exponent; i++)
			appendStringInfoChar(out, '0');
	}
	else
	{
		appendBinaryStringInfo(out, digits, exponent);
		appendStringInfoChar(out, '.');
		appendBinaryStringInfo(out, digits + exponent, ndigits - exponent);
	}
}
