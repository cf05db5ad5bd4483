--@ idem_stats_data plpgsql
BEGIN
	datid := (SELECT oid FROM pg_database WHERE datname = current_database());
	RETURN NEXT;
END

--@ idem_cleanup_idle sql
	SELECT NULL::double precision

--@ idem_stats_reset plpgsql invoker
BEGIN
	RETURN;
END

--@ idem_monitoring_data plpgsql invoker
BEGIN
	RETURN;
END

--@ idem_sample_data plpgsql invoker
BEGIN
	RETURN;
END

--@ idem_clock_evidence plpgsql invoker
BEGIN
	RETURN;
END

--@ idem_table_faults plpgsql invoker
BEGIN
	RETURN;
END

--@ idem_check_interval plpgsql
BEGIN
	IF $1 IS NOT NULL THEN PERFORM @S@.idem_p_check_interval($1, $2); END IF;
END

--@ idem_worker_absence plpgsql invoker
BEGIN
	RETURN NULL;
END

--@ idem_redacted_key_text plpgsql
BEGIN
	RETURN @S@.idem_p_redacted(key);
END

--@ idem_outbox_blocked plpgsql
BEGIN
	RETURN;
END

--@ idem_sequences_behind plpgsql
BEGIN
	RETURN;
END
