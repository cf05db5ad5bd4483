/*-------------------------------------------------------------------------
 *
 * log_events.c
 *		idempotency.log_events: a line in the server log for each event.
 *
 * A line is "idempotency" and fields "name=value", separated by single spaces
 * (logfmt).  A value is put between double quotes if it contains a space, a
 * quote, a backslash, an equals sign, or anything but printable ASCII.  In
 * quotes, a backslash precedes a quote or backslash, and a byte that is not
 * printable ASCII is written as \xHH.  So an event is one line, and clients
 * cannot forge fields, in any database encoding.
 *
 * With idempotency.log_format = json a line is an object with the same
 * fields, in ASCII; other characters are escaped as in JSON.  If the database
 * encoding is not UTF-8, bytes are written as the characters with that
 * number.
 *
 * Keys are redacted as in errors.  Request hashes, responses, checkpoints and
 * payloads are not logged.  The lines go to the server log only, and are
 * written when the call does its work, whether or not its transaction
 * commits.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "util/compat.h"
#include "util/log_events.h"

static void append_name(StringInfo line, const char *name);
static void append_logfmt(StringInfo line, const char *data, int length);
static void append_json(StringInfo line, const char *data, int length);

/*
 * Begin the line of an event.  idem_log_end() writes it.
 */
void
idem_log_begin(StringInfo line, IdemEvent event)
{
	initStringInfo(line);
	appendStringInfo(line, idem_log_format == IDEM_LOG_JSON ?
					 "{\"source\":\"idempotency\",\"event\":\"%s\"" :
					 "idempotency event=%s", idem_event_names[event]);
}

/*
 * Write a line to the server log, and free its memory.
 */
void
idem_log_end(StringInfo line)
{
	if (idem_log_format == IDEM_LOG_JSON)
		appendStringInfoChar(line, '}');
	ereport(LOG_SERVER_ONLY,
			(errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			 errmsg_internal("%s", line->data),
			 errhidestmt(true),
			 errhidecontext(true)));
	pfree(line->data);
}

static void
append_name(StringInfo line, const char *name)
{
	appendStringInfo(line, idem_log_format == IDEM_LOG_JSON ?
					 ",\"%s\":" : " %s=", name);
}

void
idem_log_number(StringInfo line, const char *name, int64 value)
{
	append_name(line, name);
	appendStringInfo(line, INT64_FORMAT, value);
}

/*
 * Append a field whose text can contain anything.
 */
void
idem_log_text(StringInfo line, const char *name, Datum value)
{
	text	   *whole = DatumGetTextPP(value);

	append_name(line, name);
	(idem_log_format == IDEM_LOG_JSON ? append_json : append_logfmt)
		(line, VARDATA_ANY(whole), VARSIZE_ANY_EXHDR(whole));
}

static void
append_logfmt(StringInfo line, const char *data, int length)
{
	bool		quoted = length == 0;

	for (int i = 0; i < length && !quoted; i++)
	{
		unsigned char c = data[i];

		quoted = c <= ' ' || c > '~' || strchr("\"\\=", c) != NULL;
	}

	if (quoted)
		appendStringInfoChar(line, '"');
	for (int i = 0; i < length; i++)
	{
		unsigned char c = data[i];

		if (c < ' ' || c > '~')
			appendStringInfo(line, "\\x%02x", c);
		else
		{
			if (c == '"' || c == '\\')
				appendStringInfoChar(line, '\\');
			appendStringInfoChar(line, c);
		}
	}
	if (quoted)
		appendStringInfoChar(line, '"');
}

static void
append_json(StringInfo line, const char *data, int length)
{
	appendStringInfoChar(line, '"');
	for (int i = 0; i < length;)
	{
		unsigned char c = data[i];
		uint32		code = c;
		int			size = 1;

		if (c > '~' && GetDatabaseEncoding() == PG_UTF8)
		{
			size = pg_utf_mblen((const unsigned char *) data + i);
			if (size <= length - i)
				code = utf8_to_unicode((const unsigned char *) data + i);
			else
				size = 1;
		}
		if (code > 0xFFFF)
			appendStringInfo(line, "\\u%04x\\u%04x",
							 0xD800 + ((code - 0x10000) >> 10),
							 0xDC00 + ((code - 0x10000) & 0x3FF));
		else if (code < ' ' || code > '~')
			appendStringInfo(line, "\\u%04x", code);
		else
		{
			if (c == '"' || c == '\\')
				appendStringInfoChar(line, '\\');
			appendStringInfoChar(line, c);
		}
		i += size;
	}
	appendStringInfoChar(line, '"');
}
