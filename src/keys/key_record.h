/*-------------------------------------------------------------------------
 *
 * key_record.h
 *		The rows of idem_keys.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEY_RECORD_H
#define IDEMPOTENCY_KEY_RECORD_H

#include "datatype/timestamp.h"
#include "fmgr.h"
#include "store/store.h"
#include "util/log_events.h"

/* The columns of idem_keys, in order. */
enum
{
	KEYS_CLAIM_TOKEN,
	KEYS_CREATED_AT,
	KEYS_COMPLETED_AT,
	KEYS_LEASE_EXPIRES_AT,
	KEYS_RESUME_AT,
	KEYS_EXPIRES_AT,
	KEYS_ATTEMPT,
	KEYS_RESPONSE_STATUS,
	KEYS_STATE,
	KEYS_SCOPE,
	KEYS_KEY,
	KEYS_REQUEST_HASH,
	KEYS_RESPONSE_HEADERS,
	KEYS_RESPONSE_BODY,
	KEYS_RESPONSE_BYTES,
	KEYS_ERROR,
	KEYS_RECOVERY_POINT,
	KEYS_RECOVERY_STATE,
	KEYS_REQUEST,
	KEYS_NUM_COLUMNS,
};

typedef enum IdemKeyState
{
	IDEM_STATE_STARTED,
	IDEM_STATE_COMPLETED,
	IDEM_STATE_FAILED,
	IDEM_STATE_ERASED,
} IdemKeyState;

/*
 * A new version of a row; columns not "given" keep the old version's value.
 *
 * Given values belong to the caller, kept ones to cursor->row.  So they are
 * valid until the next find, or until the table is closed.
 */
typedef struct IdemKeyRecord
{
	Datum		values[KEYS_NUM_COLUMNS];
	bool		nulls[KEYS_NUM_COLUMNS];
	bool		given[KEYS_NUM_COLUMNS];
} IdemKeyRecord;

extern const char *const idem_state_names[];

extern void idem_key_args(FunctionCallInfo fcinfo, Datum *key);
extern void idem_writer_key_args(FunctionCallInfo fcinfo, Datum *key);
extern void idem_check_new_key(Datum key);
extern char *idem_redacted_key(Datum key);

extern void idem_record_set(IdemKeyRecord *record, int column, Datum value);
extern void idem_record_set_or_null(IdemKeyRecord *record, int column,
									Datum value);
extern void idem_record_keep(IdemKeyRecord *record, IdemCursor *cursor);
extern void idem_record_set_resume_at(IdemKeyRecord *record,
									  IdemKeyState state, TimestampTz now);
extern void idem_resumable_key(Datum *key, Datum scope);
extern Datum idem_state_datum(IdemKeyState state);
extern int64 idem_next_claim_token(int64 previous);

extern IdemKeyState idem_found_state(IdemCursor *cursor);
extern bool idem_found_is_expired(IdemCursor *cursor, TimestampTz now);

extern void idem_write_key_event(IdemEvent event, const Datum *record);
extern void idem_write_in_progress_event(const Datum *key);

/*
 * Log an event of this row of idem_keys, if such events are logged.
 */
static inline void
idem_log_key_event(IdemEvent event, const Datum *record)
{
	if (idem_event_is_logged(event))
		idem_write_key_event(event, record);
}

/*
 * Log a claim that found another one at its scope and key, if such events are
 * logged.
 */
static inline void
idem_log_in_progress_event(const Datum *key)
{
	if (idem_event_is_logged(IDEM_EVENT_IN_PROGRESS))
		idem_write_in_progress_event(key);
}

#endif							/* IDEMPOTENCY_KEY_RECORD_H */
