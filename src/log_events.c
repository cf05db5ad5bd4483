/*-------------------------------------------------------------------------
 *
 * log_events.c
 *		idempotency.log_events: a line in the server log for each event.
 *
 * A line is "idempotency" and fields "name=value", apart by single spaces
 * (logfmt).  A value with anything but printable ASCII in it, or with a
 * space, a quote, a backslash or an equals sign, is put between double
 * quotes; within them a quote or backslash has a backslash before it, and a
 * byte that is not printable ASCII is written \xHH.  So a line is one line and
 * its fields are ours, whatever the clients send and whatever encoding their
 * database has.
 *
 * With idempotency.log_format = json a line is an object of the same fields, in
 * ASCII: what is none is escaped as JSON has it.  Bytes of a database whose
 * encoding is not UTF-8 are written as the characters of that number.
 *
 * Keys are redacted as in errors.  Request hashes, responses, checkpoints and
 * payloads are not logged.  The lines go to the server log only, and are
 * written when the call does its work, whether or not its transaction commits.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/uuid.h"

#include "compat.h"
#include "key_record.h"
#include "log_events.h"
#include "outbox_row.h"

static void begin_line(StringInfo line, IdemEvent event);
static void write_line(StringInfo line);
static void append_name(StringInfo line, const char *name);
static void append_number(StringInfo line, const char *name, int64 value);
static void append_text(StringInfo line, const char *name, Datum value);
static void append_logfmt(StringInfo line, const char *data, int length);
static void append_json(StringInfo line, const char *data, int length);
static void append_scope_and_key(StringInfo line, Datum scope, Datum key);

/*
 * A line about a key.  "record" has the columns of idem_keys.
 */
void
idem_write_key_event(IdemEvent event, const Datum *record)
{
	StringInfoData line;

	begin_line(&line, event);
	append_scope_and_key(&line, record[KEYS_SCOPE], record[KEYS_KEY]);
	append_number(&line, "attempt", DatumGetInt32(record[KEYS_ATTEMPT]));
	append_number(&line, "token", DatumGetInt64(record[KEYS_CLAIM_TOKEN]));
	if (event == IDEM_EVENT_REPLAYED)
		append_number(&line, "status",
					  DatumGetInt32(record[KEYS_RESPONSE_STATUS]));
	write_line(&line);
}

/*
 * A line about a key whose record is another's, and perhaps not committed, so
 * that nothing of it is told.
 */
void
idem_write_in_progress_event(const Datum *key)
{
	StringInfoData line;

	begin_line(&line, IDEM_EVENT_IN_PROGRESS);
	append_scope_and_key(&line, key[0], key[1]);
	write_line(&line);
}

/*
 * A line about an action.  "entity" has the columns of the primary key of
 * idem_action_versions.
 */
void
idem_write_stale_event(const Datum *entity, int64 action_id,
					   int64 last_action_id)
{
	StringInfoData line;

	begin_line(&line, IDEM_EVENT_STALE);
	append_text(&line, "user", entity[0]);
	append_text(&line, "entity_type", entity[1]);
	append_text(&line, "entity", entity[2]);
	append_number(&line, "action_id", action_id);
	append_number(&line, "last_action_id", last_action_id);
	write_line(&line);
}

/*
 * A line about a message.  "message" has the columns of idem_outbox.
 */
void
idem_write_message_event(IdemEvent event, const Datum *message)
{
	StringInfoData line;
	Datum		uuid = message[OUTBOX_MESSAGE_ID];
	char	   *message_id;

	message_id = DatumGetCString(DirectFunctionCall1(uuid_out, uuid));
	begin_line(&line, event);
	append_text(&line, "topic", message[OUTBOX_TOPIC]);
	append_number(&line, "id", DatumGetInt64(message[OUTBOX_ID]));
	append_text(&line, "message_id", CStringGetTextDatum(message_id));
	append_number(&line, "attempt", DatumGetInt32(message[OUTBOX_ATTEMPT]));
	write_line(&line);
	pfree(message_id);
}

/*
 * A line about a batch of the cleanup.
 */
void
idem_write_cleaned_event(const char *kind, int64 deleted)
{
	StringInfoData line;

	begin_line(&line, IDEM_EVENT_CLEANED);
	append_text(&line, "kind", CStringGetTextDatum(kind));
	append_number(&line, "rows", deleted);
	write_line(&line);
}

static void
begin_line(StringInfo line, IdemEvent event)
{
	initStringInfo(line);
	appendStringInfo(line, idem_log_format == IDEM_LOG_JSON ?
					 "{\"source\":\"idempotency\",\"event\":\"%s\"" :
					 "idempotency event=%s", idem_event_names[event]);
}

/*
 * Write a line to the server log, and free it.
 */
static void
write_line(StringInfo line)
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

static void
append_number(StringInfo line, const char *name, int64 value)
{
	append_name(line, name);
	appendStringInfo(line, INT64_FORMAT, value);
}

/*
 * Append a field with a text that may contain anything.
 */
static void
append_text(StringInfo line, const char *name, Datum value)
{
	text	   *whole = DatumGetTextPP(value);

	append_name(line, name);
	(idem_log_format == IDEM_LOG_JSON ? append_json : append_logfmt)
		(line, VARDATA_ANY(whole), VARSIZE_ANY_EXHDR(whole));
}

/*
 * The key as messages show it.
 */
static void
append_scope_and_key(StringInfo line, Datum scope, Datum key)
{
	text	   *whole = DatumGetTextPP(key);
	int			shown;
	int			nchars;
	char	   *shown_key;

	idem_redact_key(key, &shown, &nchars);
	shown_key = psprintf("%.*s...(%d)", shown, VARDATA_ANY(whole), nchars);
	append_text(line, "scope", scope);
	append_text(line, "key", CStringGetTextDatum(shown_key));
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
