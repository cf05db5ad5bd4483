/*-------------------------------------------------------------------------
 *
 * outbox_row.c
 *		The row of a message: find it, write it, notify waiters, log events.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "outbox/outbox_row.h"
#include "util/commit_notify.h"
#include "util/client_text.h"
#include "util/compat.h"

static bool is_state(Datum value, const char *state);

/*
 * Return how often a message has been taken since it was published or
 * requeued, without the attempts that were released.
 */
int
idem_outbox_attempts(const Datum *message)
{
	int64		attempts = (int64) DatumGetInt32(message[OUTBOX_ATTEMPT]) -
		DatumGetInt32(message[OUTBOX_UNCOUNTED_ATTEMPTS]);

	return Max(0, Min(attempts, PG_INT32_MAX));
}

/*
 * Return the size of a message's payload and headers as text, in bytes: an
 * estimate that is never too low.  If it exceeds "limit", any number above
 * the limit.
 */
int64
idem_outbox_text_size(const IdemOutboxRow *message, int64 limit)
{
	int64		size = idem_json_text_size(message->values[OUTBOX_PAYLOAD],
										   limit);

	if (size <= limit && !message->nulls[OUTBOX_HEADERS])
		size += idem_json_text_size(message->values[OUTBOX_HEADERS],
									limit - size);
	return size;
}

/*
 * Find a message, as idem_find_latest() does.
 */
bool
idem_outbox_find(IdemCursor *outbox, int64 id)
{
	Datum		key = Int64GetDatum(id);

	CHECK_FOR_INTERRUPTS();
	return idem_find_latest(outbox, &key, NULL);
}

/*
 * Replace the message that was found.  If another transaction holds it, sleep
 * until that ends.  Returns false if the caller must find the message again.
 */
bool
idem_outbox_write(IdemCursor *outbox, IdemOutboxRow *row)
{
	IdemWrite	result = idem_update(outbox, row->values, row->nulls, false);

	if (result == IDEM_WRITE_HELD)
		idem_wait(outbox);
	if (result == IDEM_WRITE_DONE)
		idem_outbox_changes(row);
	return result == IDEM_WRITE_DONE;
}

/*
 * An existing message has been written: announce when it, or the next one of
 * its key, can be taken.
 */
void
idem_outbox_changes(const IdemOutboxRow *row)
{
	TimestampTz due = DT_NOEND;

	if (is_state(row->values[OUTBOX_STATE], "pending"))
		due = DatumGetTimestampTz(row->values[OUTBOX_AVAILABLE_AT]);
	else if (!row->nulls[OUTBOX_KEY_HASH])
		due = DT_NOBEGIN;
	idem_notify_message(row->values[OUTBOX_TOPIC], due, true);
}

/*
 * Is the message that was found in this state?
 */
bool
idem_outbox_in_state(IdemCursor *outbox, const char *state)
{
	return is_state(outbox->row->tts_values[OUTBOX_STATE], state);
}

static bool
is_state(Datum value, const char *state)
{
	text	   *name = DatumGetTextPP(value);

	return VARSIZE_ANY_EXHDR(name) == strlen(state) &&
		memcmp(VARDATA_ANY(name), state, strlen(state)) == 0;
}

/*
 * Copy the message that was found, to make a new version of it.
 */
void
idem_outbox_copy(IdemCursor *outbox, IdemOutboxRow *row)
{
	memcpy(row->values, outbox->row->tts_values, sizeof(row->values));
	memcpy(row->nulls, outbox->row->tts_isnull, sizeof(row->nulls));
}

void
idem_outbox_set(IdemOutboxRow *row, int column, Datum value)
{
	row->values[column] = value;
	row->nulls[column] = false;
}

/*
 * Write the log line of an event of this row of idem_outbox.
 */
void
idem_write_message_event(IdemEvent event, const Datum *message)
{
	StringInfoData line;
	Datum		uuid = message[OUTBOX_MESSAGE_ID];
	char	   *message_id;

	message_id = DatumGetCString(DirectFunctionCall1(uuid_out, uuid));
	idem_log_begin(&line, event);
	idem_log_text(&line, "topic", message[OUTBOX_TOPIC]);
	idem_log_number(&line, "id", DatumGetInt64(message[OUTBOX_ID]));
	idem_log_text(&line, "message_id", CStringGetTextDatum(message_id));
	idem_log_number(&line, "attempt", DatumGetInt32(message[OUTBOX_ATTEMPT]));
	idem_log_end(&line);
	pfree(message_id);
}
