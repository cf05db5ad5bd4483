/*-------------------------------------------------------------------------
 *
 * settings.h
 *		The idempotency.* settings.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_H
#define IDEMPOTENCY_SETTINGS_H

#include "nodes/pg_list.h"

typedef enum IdemExpiredKeyPolicy
{
	IDEM_EXPIRED_REUSE,
	IDEM_EXPIRED_REJECT,
} IdemExpiredKeyPolicy;

typedef enum IdemKeyFormat
{
	IDEM_KEY_TOKEN,
	IDEM_KEY_PRINTABLE,
	IDEM_KEY_UUID,
} IdemKeyFormat;

typedef enum IdemLogFormat
{
	IDEM_LOG_LOGFMT,
	IDEM_LOG_JSON,
} IdemLogFormat;

/* The events that idempotency.log_events can name. */
typedef enum IdemEvent
{
	IDEM_EVENT_CLAIMED,
	IDEM_EVENT_TAKEN_OVER,
	IDEM_EVENT_REPLAYED,
	IDEM_EVENT_IN_PROGRESS,
	IDEM_EVENT_HASH_CONFLICT,
	IDEM_EVENT_COMPLETED,
	IDEM_EVENT_FAILED,
	IDEM_EVENT_RELEASED,
	IDEM_EVENT_STALE,
	IDEM_EVENT_APPENDED,
	IDEM_EVENT_NOT_APPENDED,
	IDEM_EVENT_PUBLISHED,
	IDEM_EVENT_RELAYED,
	IDEM_EVENT_NACKED,
	IDEM_EVENT_DEAD,
	IDEM_EVENT_CLEANED,
	IDEM_NUM_EVENTS,
} IdemEvent;

extern const char *const idem_event_names[];

/* Times are in milliseconds, sizes in bytes. */
extern double idem_default_ttl;
extern double idem_default_lease;	/* at most idem_max_lease */
extern double idem_max_lease;
extern double idem_max_wait;
extern int	idem_key_min_length;
extern int	idem_key_max_length;
extern int	idem_key_format;
extern int	idem_expired_key_policy;
extern double idem_tombstone_retention;
extern double idem_max_action_id_lead;
extern int	idem_max_new_keys_per_minute;
extern int	idem_max_attempts;
extern bool idem_require_request_hash;
extern bool idem_require_pinned_scope;
extern int	idem_log_events;	/* a bit for each IdemEvent */
extern int	idem_log_format;
extern char *idem_route;
extern double idem_token_ttl;
extern int	idem_outbox_max_attempts;
extern double idem_outbox_retention;
extern double idem_cleanup_interval;
extern double idem_cleanup_delay;
extern int	idem_cleanup_batch_size;
extern char *idem_databases;
extern int	idem_max_response_size;
extern int	idem_max_message_size;

/* Has the postmaster loaded the library, so that there is a launcher? */
extern bool idem_has_launcher;

extern void idem_define_settings(void);
extern void idem_check_settings(void);
extern bool idem_is_listed(const List *names, const char *database);

#endif							/* IDEMPOTENCY_SETTINGS_H */
