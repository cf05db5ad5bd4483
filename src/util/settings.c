/*-------------------------------------------------------------------------
 *
 * settings.c
 *		The idempotency.* settings.
 *
 * Anybody can set defaults that a call can override.  Settings that protect
 * the operator are for superusers and roles with SET privilege.
 *
 * If the library is not preloaded, the server accepts values for settings
 * that are not defined yet, from anyone, and checks them when they are
 * defined here.  Then it drops a value that a session has SET without the
 * privilege, and the value below it remains: that of the configuration, the
 * database or the role.  But for the values with which a session began, the
 * server has kept only the one with the highest priority.  If that is
 * dropped, because it is the client's or is invalid, the operator's value is
 * lost, and calls would use the built-in default.  In such a session all
 * writing functions are refused.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"
#include "utils/varlena.h"

#include "util/client_text.h"
#include "util/compat.h"
#include "util/settings.h"

#define PREFIX			"idempotency"

#define MS_PER_MINUTE	(60.0 * 1000)
#define MS_PER_HOUR		(60 * MS_PER_MINUTE)
#define MS_PER_DAY		(24 * MS_PER_HOUR)

/* The shortest idempotency.cleanup_interval, in milliseconds. */
#define MIN_CLEANUP_INTERVAL	1000

/* A century: a longer time has no use, and no timestamp overflows. */
#define MAX_MS			(36525 * MS_PER_DAY)

double		idem_default_ttl;
double		idem_default_lease;
double		idem_max_lease;
double		idem_max_wait;
int			idem_key_min_length;
int			idem_key_max_length;
int			idem_key_format;
int			idem_expired_key_policy;
double		idem_tombstone_retention;
double		idem_max_action_id_lead;
int			idem_max_new_keys_per_minute;
int			idem_max_attempts;
bool		idem_require_request_hash;
bool		idem_require_pinned_scope;
bool		idem_has_launcher = false;
int			idem_log_events;
int			idem_log_format;
char	   *idem_route;
double		idem_token_ttl;
int			idem_outbox_max_attempts;
double		idem_outbox_retention;
double		idem_cleanup_interval;
double		idem_cleanup_delay;
int			idem_cleanup_batch_size;
char	   *idem_databases;
int			idem_max_response_size;
int			idem_max_message_size;

const char *const idem_event_names[] = {
	[IDEM_EVENT_CLAIMED] = "claimed",
	[IDEM_EVENT_TAKEN_OVER] = "taken_over",
	[IDEM_EVENT_REPLAYED] = "replayed",
	[IDEM_EVENT_IN_PROGRESS] = "in_progress",
	[IDEM_EVENT_HASH_CONFLICT] = "hash_conflict",
	[IDEM_EVENT_COMPLETED] = "completed",
	[IDEM_EVENT_FAILED] = "failed",
	[IDEM_EVENT_RELEASED] = "released",
	[IDEM_EVENT_STALE] = "stale",
	[IDEM_EVENT_APPENDED] = "appended",
	[IDEM_EVENT_NOT_APPENDED] = "not_appended",
	[IDEM_EVENT_PUBLISHED] = "published",
	[IDEM_EVENT_RELAYED] = "relayed",
	[IDEM_EVENT_NACKED] = "nacked",
	[IDEM_EVENT_DEAD] = "dead",
	[IDEM_EVENT_CLEANED] = "cleaned",
};

/* The value of idempotency.default_lease, not limited by max_lease. */
static double default_lease;

/*
 * The value of idempotency.log_events, from which idem_log_events is
 * computed.
 */
static char *log_events;

/* Thresholds of idem_health(), which reads them from pg_settings. */
static double health_worker;
static double health_cleanup_lag;
static double health_outbox_oldest;
static double health_outbox_blocked;
static int	health_dead_letters;
static int	health_stuck_leases;
static double health_bloat;
static double health_clock;
static int	health_tables;
static int	health_sequences;
static double health_moves;

static const struct config_enum_entry expired_key_policies[] = {
	{"reuse", IDEM_EXPIRED_REUSE, false},
	{"reject", IDEM_EXPIRED_REJECT, false},
	{NULL, 0, false}
};

static const struct config_enum_entry key_formats[] = {
	{"token", IDEM_KEY_TOKEN, false},
	{"printable", IDEM_KEY_PRINTABLE, false},
	{"uuid", IDEM_KEY_UUID, false},
	{NULL, 0, false}
};

static const struct config_enum_entry log_formats[] = {
	{"logfmt", IDEM_LOG_LOGFMT, false},
	{"json", IDEM_LOG_JSON, false},
	{NULL, 0, false}
};

/*
 * A setting of the operator whose value was lost when it was defined, or
 * NULL; and the source of the value that replaced it.
 */
static const char *lost_setting = NULL;
static GucSource lost_to;

/* The value that a setting had before it was defined. */
typedef struct EarlyValue
{
	const char *name;
	GucSource	source;
} EarlyValue;

static List *early_values(void);
static void check_early_values(List *values);
static void define_settings(void);
static void define_lease_settings(void);
static void assign_default_lease(double newval, void *extra);
static void assign_max_lease(double newval, void *extra);
static bool check_cleanup_interval(double *newval, void **extra,
								   GucSource source);
static bool check_databases(char **newval, void **extra, GucSource source);
static bool check_log_events(char **newval, void **extra, GucSource source);
static void assign_log_events(const char *newval, void *extra);
static void define_health_settings(void);
static void define_time(const char *name, const char *short_desc,
						const char *long_desc, double *variable,
						double boot_value, GucContext context);

/*
 * Define all settings; called once, by _PG_init().
 */
void
idem_define_settings(void)
{
	List	   *values = early_values();

	define_settings();

	/* The server checks the configuration when it starts. */
	if (!process_shared_preload_libraries_in_progress)
		check_early_values(values);
}

/*
 * Raise an error in a session that has lost a setting of the operator.
 * Called before all actions that depend on a setting.
 */
void
idem_check_settings(void)
{
	if (likely(lost_setting == NULL))
		return;
	if (lost_to == PGC_S_CLIENT)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to set parameter \"%s\"",
						lost_setting),
				 errdetail("The connection was opened with a value for it, which replaced the value for this server, database or role."),
				 errhint("Connect again without it: check PGOPTIONS and the connection's options.")));
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("invalid value for parameter \"%s\"", lost_setting),
			 errdetail("Its value for the server, the database or the role is invalid, so no other value for it is in effect."),
			 errhint("Correct it with ALTER SYSTEM, ALTER DATABASE or ALTER ROLE, and connect again.")));
}

/*
 * Return our settings that have a value already, by the names that were used
 * for them, which can differ in case.
 */
static List *
early_values(void)
{
	List	   *values = NIL;
	int			count;
	struct config_generic **variables = get_guc_variables(&count);

	for (int i = 0; i < count; i++)
	{
		EarlyValue *value;

		if (pg_strncasecmp(variables[i]->name, PREFIX ".",
						   strlen(PREFIX ".")) != 0 ||
			variables[i]->reset_source == PGC_S_DEFAULT)
			continue;
		value = palloc(sizeof(EarlyValue));
		value->name = pstrdup(variables[i]->name);
		value->source = variables[i]->reset_source;
		values = lappend(values, value);
	}
	return values;
}

/*
 * Called when the settings are defined: set lost_setting to one that did not
 * take its value.  For settings that anybody can set, a value that comes with
 * the connection is not the operator's.
 */
static void
check_early_values(List *values)
{
	int			count;
	struct config_generic **variables = get_guc_variables(&count);
	ListCell   *cell;

	foreach(cell, values)
	{
		EarlyValue *value = lfirst(cell);

		for (int i = 0; i < count; i++)
		{
			if ((variables[i]->context == PGC_SUSET ||
				 (variables[i]->context == PGC_USERSET &&
				  value->source < PGC_S_CLIENT)) &&
				variables[i]->reset_source != value->source &&
				pg_strcasecmp(variables[i]->name, value->name) == 0)
			{
				lost_setting = variables[i]->name;
				lost_to = value->source;
			}
		}
	}
}

static void
define_settings(void)
{
	define_time("idempotency.default_ttl",
				"How long a request key is remembered, if the call does not specify it.",
				NULL, &idem_default_ttl, MS_PER_DAY, PGC_USERSET);
	define_lease_settings();

	DefineCustomIntVariable("idempotency.key_min_length",
							"Shortest request key that is accepted, in characters.",
							NULL, &idem_key_min_length, 16, 1, 255,
							PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("idempotency.key_max_length",
							"Longest request key that is accepted, in characters.",
							NULL, &idem_key_max_length, 128, 1, 255,
							PGC_SUSET, 0, NULL, NULL, NULL);

	DefineCustomEnumVariable("idempotency.key_format",
							 "Allowed characters of a request key, and their positions.",
							 "\"token\" allows A-Z a-z 0-9 _ - : . and \"printable\" any printable ASCII; \"uuid\" wants 8-4-4-4-12 hexadecimal digits.",
							 &idem_key_format, IDEM_KEY_TOKEN, key_formats,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomEnumVariable("idempotency.expired_key_policy",
							 "Effect of a claim of an expired request key.",
							 "\"reuse\" runs the request again as a new one, \"reject\" refuses it.",
							 &idem_expired_key_policy, IDEM_EXPIRED_REUSE,
							 expired_key_policies,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	define_time("idempotency.tombstone_retention",
				"How long after its expiry a request key is kept to be rejected.",
				"Zero rejects it until the cleanup has removed it.",
				&idem_tombstone_retention, 7 * MS_PER_DAY, PGC_SUSET);

	define_time("idempotency.max_action_id_lead",
				"How far an action id can be ahead of the server's clock.",
				"The action id is read as milliseconds since 1970. Zero turns the check off.",
				&idem_max_action_id_lead, 0, PGC_SUSET);

	DefineCustomIntVariable("idempotency.max_new_keys_per_minute",
							"Maximum number of new request keys of a scope in a minute.",
							"Zero turns the check off.",
							&idem_max_new_keys_per_minute, 0, 0, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("idempotency.require_request_hash",
							 "Refuses a claim without a request hash.",
							 NULL, &idem_require_request_hash, false,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomBoolVariable("idempotency.require_pinned_scope",
							 "Refuses writing calls for a scope that the transaction has not pinned.",
							 "For shards: scale-out/shard.sql turns it on.",
							 &idem_require_pinned_scope, false,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("idempotency.max_attempts",
							"Maximum number of attempts at a request for idem_resume().",
							"Attempts of the client count, too.",
							&idem_max_attempts, 10, 1, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("idempotency.log_events",
							   "Writes a line to the server log for each event, or for those that are listed.",
							   "\"on\" or \"all\" means all. Request keys are cut to four characters; responses and payloads are not logged.",
							   &log_events, "off",
							   PGC_SUSET, GUC_LIST_INPUT,
							   check_log_events, assign_log_events, NULL);
	DefineCustomEnumVariable("idempotency.log_format",
							 "Format of the lines of idempotency.log_events.",
							 NULL, &idem_log_format, IDEM_LOG_LOGFMT,
							 log_formats,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("idempotency.route",
							   "The route of the current request, for the lines of idempotency.log_events.",
							   "A line shows up to 128 bytes of it, and nothing from a \"?\" or \"#\" on.",
							   &idem_route, "",
							   PGC_USERSET, 0, NULL, NULL, NULL);

	define_time("idempotency.token_ttl",
				"How long a once-only token is remembered, if the call does not specify it.",
				NULL, &idem_token_ttl, 7 * MS_PER_DAY, PGC_USERSET);

	DefineCustomIntVariable("idempotency.outbox_max_attempts",
							"How often an outbox message is handed out before it is dead.",
							NULL, &idem_outbox_max_attempts, 10, 1, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);

	define_time("idempotency.outbox_retention",
				"How long acknowledged outbox messages are kept.",
				NULL, &idem_outbox_retention, 7 * MS_PER_DAY, PGC_SUSET);

	DefineCustomRealVariable("idempotency.cleanup_interval",
							 "Interval at which the background worker deletes expired rows.",
							 "At least one second. Zero turns it off.",
							 &idem_cleanup_interval, MS_PER_MINUTE, 0, MAX_MS,
							 PGC_SIGHUP, GUC_UNIT_MS,
							 check_cleanup_interval, NULL, NULL);
	define_time("idempotency.cleanup_delay",
				"How long the background worker pauses between two batches.",
				"Zero turns the pause off.",
				&idem_cleanup_delay, 0, PGC_SIGHUP);
	DefineCustomIntVariable("idempotency.cleanup_batch_size",
							"How many rows of a table the cleanup deletes in one transaction.",
							NULL, &idem_cleanup_batch_size, 10000, 1, INT_MAX,
							PGC_SIGHUP, 0, NULL, NULL, NULL);
	DefineCustomStringVariable("idempotency.databases",
							   "Databases that the background worker visits.",
							   "A list of names, or \"*\" for all.",
							   &idem_databases, "*",
							   PGC_SIGHUP, GUC_LIST_INPUT,
							   check_databases, NULL, NULL);

	DefineCustomIntVariable("idempotency.max_response_size",
							"Largest response body that is stored.",
							"Also bounds response headers and recovery state.",
							&idem_max_response_size, 1024 * 1024, 0, INT_MAX,
							PGC_SUSET, GUC_UNIT_BYTE, NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.max_message_size",
							"Largest message that is published.",
							"Bounds the text of payload and headers together.",
							&idem_max_message_size, 16 * 1024 * 1024, 1,
							IDEM_MAX_TEXT_SIZE,
							PGC_SUSET, GUC_UNIT_BYTE, NULL, NULL, NULL);

	define_health_settings();
	MarkGUCPrefixReserved(PREFIX);
}

/*
 * Define the limits of leases and waits, and the default lease.  Anybody can
 * set the default, so it is cut to its limit.
 */
static void
define_lease_settings(void)
{
	DefineCustomRealVariable("idempotency.max_lease",
							 "Longest lease that a call can request.",
							 "Also limits idempotency.default_lease.",
							 &idem_max_lease, 12 * MS_PER_HOUR, 0, MAX_MS,
							 PGC_SUSET, GUC_UNIT_MS,
							 NULL, assign_max_lease, NULL);
	DefineCustomRealVariable("idempotency.default_lease",
							 "How long a committed claim is protected, if the call does not specify it.",
							 "At most idempotency.max_lease.",
							 &default_lease, MS_PER_MINUTE, 0, MAX_MS,
							 PGC_USERSET, GUC_UNIT_MS,
							 NULL, assign_default_lease, NULL);
	define_time("idempotency.max_wait",
				"Longest wait that a call can request.",
				NULL, &idem_max_wait, 10 * MS_PER_MINUTE, PGC_SUSET);
}

static void
assign_default_lease(double newval, void *extra)
{
	idem_default_lease = Min(newval, idem_max_lease);
}

static void
assign_max_lease(double newval, void *extra)
{
	idem_default_lease = Min(default_lease, newval);
}

/*
 * Check hook: zero, or at least a second, because each interval costs a
 * process for each database.
 */
static bool
check_cleanup_interval(double *newval, void **extra, GucSource source)
{
	if (*newval == 0 || *newval >= MIN_CLEANUP_INTERVAL)
		return true;
	GUC_check_errdetail("It must be 0 or at least 1 s.");
	return false;
}

/*
 * Check hook: a list of names.
 */
static bool
check_databases(char **newval, void **extra, GucSource source)
{
	char	   *copy = pstrdup(*newval);
	List	   *names;
	bool		is_list = SplitIdentifierString(copy, ',', &names);

	if (!is_list)
	{
		GUC_check_errdetail("It is not a list of names.");
		GUC_check_errhint("Separate names with commas, and put names that are not in lower case in double quotes.");
	}
	list_free(names);
	pfree(copy);
	return is_list;
}

/*
 * Check hook: a boolean, "all", or a list of events.  Puts their bits into
 * "extra".
 */
static bool
check_log_events(char **newval, void **extra, GucSource source)
{
	int			events = 0;
	bool		all;

	if (parse_bool(*newval, &all) ||
		(all = (pg_strcasecmp(*newval, "all") == 0)))
		events = all ? (1 << IDEM_NUM_EVENTS) - 1 : 0;
	else
	{
		char	   *copy = pstrdup(*newval);
		List	   *names;
		ListCell   *lc;

		if (!SplitIdentifierString(copy, ',', &names))
		{
			GUC_check_errdetail("It is not a list of words.");
			return false;
		}
		foreach(lc, names)
		{
			const char *name = lfirst(lc);
			int			event = 0;

			while (event < IDEM_NUM_EVENTS &&
				   strcmp(name, idem_event_names[event]) != 0)
				event++;
			if (event == IDEM_NUM_EVENTS)
			{
				GUC_check_errdetail("There is no event \"%s\".", name);
				GUC_check_errhint("Valid values are off, on, or a list of claimed, taken_over, replayed, in_progress, hash_conflict, completed, failed, released, stale, appended, not_appended, published, relayed, nacked, dead, cleaned.");
				return false;
			}
			events |= 1 << event;
		}
		list_free(names);
		pfree(copy);
	}

	*extra = guc_malloc(LOG, sizeof(int));
	if (*extra == NULL)
		return false;
	*(int *) *extra = events;
	return true;
}

static void
assign_log_events(const char *newval, void *extra)
{
	idem_log_events = *(int *) extra;
}

/*
 * Define the thresholds of idem_health(), one setting for each check, named
 * after it.
 */
static void
define_health_settings(void)
{
	static const char *const zero_is_off = "Zero turns the check off.";

	define_time("idempotency.health_worker",
				"How long after the last cleanup idem_health() warns.",
				zero_is_off, &health_worker, 5 * MS_PER_MINUTE, PGC_SUSET);
	define_time("idempotency.health_cleanup_lag",
				"How overdue the deletion of a record must be for idem_health() to warn.",
				zero_is_off, &health_cleanup_lag, 10 * MS_PER_MINUTE,
				PGC_SUSET);
	define_time("idempotency.health_outbox_oldest",
				"How long a message must have been due for idem_health() to warn.",
				zero_is_off, &health_outbox_oldest, 5 * MS_PER_MINUTE,
				PGC_SUSET);
	define_time("idempotency.health_outbox_blocked",
				"How long a due message must wait behind another one of its key for idem_health() to warn.",
				zero_is_off, &health_outbox_blocked, MS_PER_MINUTE,
				PGC_SUSET);
	DefineCustomIntVariable("idempotency.health_dead_letters",
							"Number of dead messages from which idem_health() warns.",
							zero_is_off, &health_dead_letters, 1, 0, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("idempotency.health_stuck_leases",
							"Number of abandoned claims from which idem_health() warns.",
							zero_is_off, &health_stuck_leases, 10, 0, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomRealVariable("idempotency.health_bloat",
							 "Share of dead rows in a table from which idem_health() warns.",
							 zero_is_off, &health_bloat, 0.5, 0, 1,
							 PGC_SUSET, 0, NULL, NULL, NULL);
	define_time("idempotency.health_clock",
				"How far the clock must have gone back for idem_health() to warn.",
				zero_is_off, &health_clock, 1000, PGC_SUSET);
	DefineCustomIntVariable("idempotency.health_tables",
							"Number of unusable tables from which idem_health() reports critical.",
							zero_is_off, &health_tables, 1, 0, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);
	DefineCustomIntVariable("idempotency.health_sequences",
							"How far a sequence must be behind its table for idem_health() to warn.",
							zero_is_off, &health_sequences, 1, 0, INT_MAX,
							PGC_SUSET, 0, NULL, NULL, NULL);
	define_time("idempotency.health_moves",
				"How long a move between shards must be unfinished for idem_health() to warn.",
				zero_is_off, &health_moves, MS_PER_MINUTE, PGC_SUSET);
}

static void
define_time(const char *name, const char *short_desc, const char *long_desc,
			double *variable, double boot_value, GucContext context)
{
	DefineCustomRealVariable(name, short_desc, long_desc, variable,
							 boot_value, 0, MAX_MS,
							 context, GUC_UNIT_MS, NULL, NULL, NULL);
}

/*
 * Does the list of idempotency.databases contain this name, or "*"?
 */
bool
idem_is_listed(const List *names, const char *database)
{
	ListCell   *cell;

	foreach(cell, names)
	{
		const char *name = lfirst(cell);

		if (strcmp(name, "*") == 0 || strcmp(name, database) == 0)
			return true;
	}
	return false;
}
