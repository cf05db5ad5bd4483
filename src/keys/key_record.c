/*-------------------------------------------------------------------------
 *
 * key_record.c
 *		The rows of idem_keys: their columns, states and key rules.
 *
 * keys.c, which claims keys, and claim_holder.c, which acts on claims, share
 * this file.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <ctype.h>

#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "keys/key_record.h"
#include "store/pg_sequence.h"
#include "util/arguments.h"
#include "util/compat.h"
#include "util/errors.h"
#include "util/pinned_scope.h"
#include "util/settings.h"

/* The maximum length of a route in a log line, in bytes. */
#define MAX_ROUTE	128

const char *const idem_state_names[] = {
	[IDEM_STATE_STARTED] = "started",
	[IDEM_STATE_COMPLETED] = "completed",
	[IDEM_STATE_FAILED] = "failed",
	[IDEM_STATE_ERASED] = "erased",
};

static void redact_key(Datum key, int *shown, int *nchars);
static void begin_key_line(StringInfo line, IdemEvent event, Datum scope,
						   Datum key);
static const char *key_error(const char *key, int length);
static bool is_key_character(char c);
static bool is_uuid(const char *key, int length);

/*
 * Read arguments 0 and 1, a scope and a key, as the primary key of idem_keys.
 * The rules for keys might have changed since a record was made.  So only
 * callers that find no record check them, with idem_check_new_key().
 *
 * Raises 22004 or 22023 for the scope, ID001 for a key that is NULL.
 */
void
idem_key_args(FunctionCallInfo fcinfo, Datum *key)
{
	key[0] = idem_name_arg(fcinfo, 0, "scope");

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_KEY_INVALID),
				 errmsg("idempotency key must not be null")));
	key[1] = PointerGetDatum(PG_GETARG_TEXT_PP(1));
}

/*
 * The same for a function that writes.  Also raises 55000 for a scope that is
 * not pinned.
 */
void
idem_writer_key_args(FunctionCallInfo fcinfo, Datum *key)
{
	idem_key_args(fcinfo, key);
	idem_check_pin(key[0]);
}

/*
 * Raise ID001 for a key that breaks the rules for new keys.
 */
void
idem_check_new_key(Datum key)
{
	text	   *value = DatumGetTextPP(key);
	const char *error;

	idem_check_settings();
	error = key_error(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value));
	if (error != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_KEY_INVALID),
				 errmsg("invalid idempotency key %s", idem_redacted_key(key)),
				 errdetail_internal("%s", error),
				 idem_key_format == IDEM_KEY_UUID ?
				 errhint("Let the client send a UUID.") :
				 idem_key_format == IDEM_KEY_PRINTABLE ?
				 errhint("Let the client send a UUID, or any key of %d to %d printable ASCII characters.",
						 idem_key_min_length, idem_key_max_length) :
				 errhint("Let the client send a UUID, or any key of %d to %d characters out of A-Z a-z 0-9 _ - : .",
						 idem_key_min_length, idem_key_max_length)));
}

/*
 * idem_key_is_valid(key) -> boolean
 */
PG_FUNCTION_INFO_V1(idem_key_is_valid);
Datum
idem_key_is_valid(PG_FUNCTION_ARGS)
{
	text	   *key;

	if (PG_ARGISNULL(0))
		PG_RETURN_BOOL(false);
	idem_check_settings();
	key = PG_GETARG_TEXT_PP(0);
	PG_RETURN_BOOL(key_error(VARDATA_ANY(key),
							 VARSIZE_ANY_EXHDR(key)) == NULL);
}

/*
 * Return the error of a key, as a sentence; NULL if it is valid.
 */
static const char *
key_error(const char *key, int length)
{
	for (int i = 0; i < length; i++)
	{
		if (!is_key_character(key[i]))
			return _("It contains a character that is not allowed.");
	}
	if (idem_key_format == IDEM_KEY_UUID && !is_uuid(key, length))
		return _("It is not a UUID, 8-4-4-4-12 hexadecimal digits.");
	if (length < idem_key_min_length)
		return _("It is too short.");
	if (length > idem_key_max_length)
		return _("It is too long.");
	return NULL;
}

/*
 * Is this character allowed anywhere in a key?
 */
static bool
is_key_character(char c)
{
	if (idem_key_format == IDEM_KEY_PRINTABLE)
		return c >= ' ' && c <= '~';
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
		(c >= '0' && c <= '9') ||
		c == '_' || c == '-' || c == ':' || c == '.';
}

/*
 * Is a key a UUID as RFC 9562 writes it, in either case?
 */
static bool
is_uuid(const char *key, int length)
{
	static const char form[] = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";

	if (length != sizeof(form) - 1)
		return false;
	for (int i = 0; i < length; i++)
	{
		if (form[i] == '-' ? key[i] != '-' :
			!isxdigit((unsigned char) key[i]))
			return false;
	}
	return true;
}

/*
 * Return a claim token higher than "previous" and all tokens given before.
 * Raises 2200H if there is none.
 */
int64
idem_next_claim_token(int64 previous)
{
	int64		token = idem_sequence_next(IDEM_CLAIM_TOKENS);

	/*
	 * If the sequence was set back, by a partial restore for example, raise
	 * it above the record's token.
	 */
	while (token <= previous)
	{
		if (previous > IDEM_MAX_RAISE)
			ereport(ERROR,
					(errcode(ERRCODE_SEQUENCE_GENERATOR_LIMIT_EXCEEDED),
					 errmsg("no claim token is higher than that of the record"),
					 errhint("Delete the record with idem_forget().")));
		(void) idem_sequence_raise(IDEM_CLAIM_TOKENS, previous);
		token = idem_sequence_next(IDEM_CLAIM_TOKENS);
	}
	return token;
}

/*
 * Set a column of a new row version.  idem_record_set_or_null() sets a NULL
 * pointer as SQL NULL.
 */
void
idem_record_set(IdemKeyRecord *record, int column, Datum value)
{
	record->values[column] = value;
	record->nulls[column] = false;
	record->given[column] = true;
}

void
idem_record_set_or_null(IdemKeyRecord *record, int column, Datum value)
{
	idem_record_set(record, column, value);
	record->nulls[column] = (DatumGetPointer(value) == NULL);
}

/*
 * Copy the columns that are not given from the row that was found.  A new
 * lease never outlives the record.
 */
void
idem_record_keep(IdemKeyRecord *record, IdemCursor *cursor)
{
	TimestampTz expires_at;
	TimestampTz lease_expires_at;

	for (int i = 0; i < KEYS_NUM_COLUMNS; i++)
	{
		if (!record->given[i])
		{
			record->values[i] = cursor->row->tts_values[i];
			record->nulls[i] = cursor->row->tts_isnull[i];
		}
	}

	expires_at = DatumGetTimestampTz(record->values[KEYS_EXPIRES_AT]);
	lease_expires_at = DatumGetTimestampTz(record->values[KEYS_LEASE_EXPIRES_AT]);
	if (record->given[KEYS_LEASE_EXPIRES_AT] &&
		!record->nulls[KEYS_LEASE_EXPIRES_AT] && lease_expires_at > expires_at)
		record->values[KEYS_LEASE_EXPIRES_AT] = TimestampTzGetDatum(expires_at);
}

/*
 * Set the time from which idem_resume() can take the record, which will be in
 * this state: after the lease of a claim, or after a failure.  NULL without a
 * request, and when the claim is completed.  All other columns are set
 * already.
 */
void
idem_record_set_resume_at(IdemKeyRecord *record, IdemKeyState state,
						  TimestampTz now)
{
	record->given[KEYS_RESUME_AT] = true;
	record->nulls[KEYS_RESUME_AT] = record->nulls[KEYS_REQUEST] ||
		(state != IDEM_STATE_STARTED && state != IDEM_STATE_FAILED);
	record->values[KEYS_RESUME_AT] = state == IDEM_STATE_STARTED ?
		record->values[KEYS_LEASE_EXPIRES_AT] : TimestampTzGetDatum(now);
}

/*
 * Return a key that no record has.  Calls that wait for a claim to resume
 * wait for this key: if they name a single scope, for that of the scope,
 * otherwise for that of a NULL pointer.  A session that makes a claim
 * resumable notifies both.
 */
void
idem_resumable_key(Datum *key, Datum scope)
{
	Datum		empty = CStringGetTextDatum("");

	key[0] = DatumGetPointer(scope) == NULL ? empty : scope;
	key[1] = empty;
}

/*
 * Return the state of the row that was found.
 */
IdemKeyState
idem_found_state(IdemCursor *cursor)
{
	text	   *name = DatumGetTextPP(cursor->row->tts_values[KEYS_STATE]);

	/* The first letters differ. */
	switch (VARSIZE_ANY_EXHDR(name) > 0 ? *VARDATA_ANY(name) : '\0')
	{
		case 's':
			return IDEM_STATE_STARTED;
		case 'c':
			return IDEM_STATE_COMPLETED;
		case 'f':
			return IDEM_STATE_FAILED;
		case 'e':
			return IDEM_STATE_ERASED;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("unrecognized state in table \"%s\"",
							RelationGetRelationName(cursor->table->rel))));
			return IDEM_STATE_STARTED;	/* keep compiler quiet */
	}
}

Datum
idem_state_datum(IdemKeyState state)
{
	return CStringGetTextDatum(idem_state_names[state]);
}

bool
idem_found_is_expired(IdemCursor *cursor, TimestampTz now)
{
	return DatumGetTimestampTz(cursor->row->tts_values[KEYS_EXPIRES_AT]) <= now;
}

/*
 * Return the visible part of a key: its number of characters, and the length
 * in bytes of the first four, or 0 if the key has no more than these.
 */
static void
redact_key(Datum key, int *shown, int *nchars)
{
	text	   *value = DatumGetTextPP(key);
	const char *data = VARDATA_ANY(value);
	int			length = VARSIZE_ANY_EXHDR(value);

	*nchars = pg_mbstrlen_with_len(data, length);
	*shown = *nchars > 4 ? pg_mbcharcliplen(data, length, 4) : 0;
}

/*
 * Return a key as it appears in messages.
 */
char *
idem_redacted_key(Datum key)
{
	text	   *value = DatumGetTextPP(key);
	int			shown;
	int			nchars;

	redact_key(key, &shown, &nchars);
	return psprintf("\"%.*s...\" (%d characters)",
					shown, VARDATA_ANY(value), nchars);
}

/*
 * Write the log line of an event of this row of idem_keys.
 */
void
idem_write_key_event(IdemEvent event, const Datum *record)
{
	StringInfoData line;

	begin_key_line(&line, event, record[KEYS_SCOPE], record[KEYS_KEY]);
	idem_log_number(&line, "attempt", DatumGetInt32(record[KEYS_ATTEMPT]));
	idem_log_number(&line, "token", DatumGetInt64(record[KEYS_CLAIM_TOKEN]));
	if (event == IDEM_EVENT_REPLAYED)
		idem_log_number(&line, "status",
						DatumGetInt32(record[KEYS_RESPONSE_STATUS]));
	idem_log_end(&line);
}

/*
 * Write the log line of a claim that found another one at its scope and key.
 * The other record might not be committed, so the line shows none of its
 * columns.
 */
void
idem_write_in_progress_event(const Datum *key)
{
	StringInfoData line;

	begin_key_line(&line, IDEM_EVENT_IN_PROGRESS, key[0], key[1]);
	idem_log_end(&line);
}

/*
 * Begin a line with the scope, with the key as messages show it, and with the
 * route, if the session has set one.  The query of the route might be secret
 * and is omitted.
 */
static void
begin_key_line(StringInfo line, IdemEvent event, Datum scope, Datum key)
{
	text	   *whole = DatumGetTextPP(key);
	int			shown;
	int			nchars;
	char	   *shown_key;

	redact_key(key, &shown, &nchars);
	shown_key = psprintf("%.*s...(%d)", shown, VARDATA_ANY(whole), nchars);
	idem_log_begin(line, event);
	idem_log_text(line, "scope", scope);
	idem_log_text(line, "key", CStringGetTextDatum(shown_key));
	if (idem_route[0] != '\0')
	{
		int			length = strcspn(idem_route, "?#");
		int			cut = pg_mbcliplen(idem_route, length, MAX_ROUTE);

		idem_log_text(line, "route",
					  PointerGetDatum(cstring_to_text_with_len(idem_route,
															   Min(cut, length))));
	}
}
