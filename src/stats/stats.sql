
--
-- Statistics
--

CREATE FUNCTION @extschema@.idem_stats_data(
	OUT datid oid,
	OUT claims_new bigint, OUT claims_replay bigint, OUT claims_erased bigint,
	OUT claims_in_progress bigint, OUT claims_hash_conflict bigint, OUT claims_expired bigint,
	OUT takeovers bigint, OUT completions bigint, OUT failures bigint, OUT rate_limited bigint,
	OUT advances bigint, OUT advances_stale bigint, OUT appends_appended bigint, OUT appends_duplicate bigint,
	OUT appends_overlap bigint, OUT appends_gap bigint, OUT appends_in_flight bigint,
	OUT appends_version_conflict bigint, OUT once_first bigint, OUT once_seen bigint,
	OUT messages_published bigint, OUT messages_taken bigint, OUT messages_acked bigint,
	OUT messages_nacked bigint, OUT messages_dead bigint, OUT keys_deleted bigint,
	OUT tokens_deleted bigint, OUT messages_deleted bigint, OUT cleanup_passes bigint,
	OUT last_cleanup timestamptz, OUT stats_reset timestamptz)
RETURNS SETOF record
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 1000 ROWS 10
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_stats_data() IS
'The counters of view idem_stats. Members of pg_read_all_stats also see those of other databases.';

CREATE VIEW @extschema@.idem_stats AS
	SELECT d.datname, s.*
	FROM @extschema@.idem_stats_data() AS s
	JOIN pg_catalog.pg_database AS d ON d.oid OPERATOR(pg_catalog.=) s.datid;
COMMENT ON VIEW @extschema@.idem_stats IS
'Activity of the functions in each database since stats_reset, or since the server started: calls by outcome, whether or not their transactions committed, and the work of the cleanup, which counts when its transaction has committed. Members of pg_read_all_stats also see other databases. takeovers: claims of failed or abandoned keys, also counted in claims_new. rate_limited: calls that failed because their scope had reached its limit of new keys.';

CREATE FUNCTION @extschema@.idem_cleanup_idle()
RETURNS double precision
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_cleanup_idle() IS
'For how many seconds no cleanup of this database has finished, since the statistics were reset, for idem_health. NULL if there is no space for the statistics.';

CREATE FUNCTION @extschema@.idem_stats_reset()
RETURNS void
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_stats_reset() IS
'Sets the counters of this database back to zero.';
