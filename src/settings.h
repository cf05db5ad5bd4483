/*-------------------------------------------------------------------------
 *
 * settings.h
 *		The idempotency.* settings.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SETTINGS_H
#define IDEMPOTENCY_SETTINGS_H

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

/* Times are in milliseconds, sizes in bytes. */
extern double idem_default_ttl;
extern double idem_default_lease;
extern int	idem_key_min_length;
extern int	idem_key_max_length;
extern int	idem_key_format;
extern int	idem_expired_key_policy;
extern double idem_tombstone_retention;
extern double idem_max_action_id_lead;
extern int	idem_max_new_keys_per_minute;
extern bool idem_log_events;
extern double idem_token_ttl;
extern int	idem_outbox_max_attempts;
extern double idem_outbox_retention;
extern double idem_cleanup_interval;
extern int	idem_cleanup_batch_size;
extern char *idem_databases;
extern int	idem_max_response_size;

extern void idem_define_settings(void);
extern void idem_check_settings(void);

#endif							/* IDEMPOTENCY_SETTINGS_H */
