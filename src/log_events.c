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
 * Keys are redacted as in errors.  Request hashes, responses, checkpoints and
 * payloads are not logged.  The lines go to the server log only, and are
 * written when the call does its work, whether or not its transaction commits.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "utils/builtins.h"
#include "utils/uuid.h"

#include "compat.h"
#include "key_record.h"
#include "log_events.h"
#include "outbox_row.h"

static void begin_line(StringInfo line, const char *event);
static void write_line(StringInfo line);
static void append_text(StringInfo line, const char *name, Datum value);

/*
 * A line about a key.  "record" has the columns of idem_keys.
 */
void
idem_write_key_event(const char *event, const Datum *record)
{
	StringInfoData line;
	int			shown;
	int			nchars;
	text	   *key = DatumGetTextPP(record[KEYS_KEY]);
	char	   *shown_key;

	idem_redact_key(record[KEYS_KEY], &shown, &nchars);
	shown_key = psprintf("%.*s...(%d)", shown, VARDATA_ANY(key), nchars);
	begin_line(&line, event);
	append_text(&line, "scope", record[KEYS_SCOPE]);
	append_text(&line, "key", CStringGetTextDatum(shown_key));
	appendStringInfo(&line, " attempt=%d token=" INT64_FORMAT,
					 DatumGetInt32(record[KEYS_ATTEMPT]),
					 DatumGetInt64(record[KEYS_CLAIM_TOKEN]));
	write_line(&line);
}

/*
 * A line about a message.  "message" has the columns of idem_outbox.
 */
void
idem_write_message_event(const char *event, const Datum *message)
{
	StringInfoData line;
	Datum		uuid = message[OUTBOX_MESSAGE_ID];
	char	   *message_id;

	message_id = DatumGetCString(DirectFunctionCall1(uuid_out, uuid));
	begin_line(&line, event);
	append_text(&line, "topic", message[OUTBOX_TOPIC]);
	appendStringInfo(&line, " id=" INT64_FORMAT " message_id=%s attempt=%d",
					 DatumGetInt64(message[OUTBOX_ID]), message_id,
					 DatumGetInt32(message[OUTBOX_ATTEMPT]));
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

	begin_line(&line, "cleaned");
	appendStringInfo(&line, " kind=%s rows=" INT64_FORMAT, kind, deleted);
	write_line(&line);
}

static void
begin_line(StringInfo line, const char *event)
{
	initStringInfo(line);
	appendStringInfo(line, "idempotency event=%s", event);
}

/*
 * Write a line to the server log, and free it.
 */
static void
write_line(StringInfo line)
{
	ereport(LOG_SERVER_ONLY,
			(errcode(ERRCODE_SUCCESSFUL_COMPLETION),
			 errmsg_internal("%s", line->data),
			 errhidestmt(true),
			 errhidecontext(true)));
	pfree(line->data);
}

/*
 * Append a field with a text that may contain anything.
 */
static void
append_text(StringInfo line, const char *name, Datum value)
{
	text	   *whole = DatumGetTextPP(value);
	const char *data = VARDATA_ANY(whole);
	int			length = VARSIZE_ANY_EXHDR(whole);
	bool		quoted = length == 0;

	for (int i = 0; i < length && !quoted; i++)
	{
		unsigned char c = data[i];

		quoted = c <= ' ' || c > '~' || strchr("\"\\=", c) != NULL;
	}

	appendStringInfo(line, " %s=%s", name, quoted ? "\"" : "");
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
