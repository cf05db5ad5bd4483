--
-- Storage: large columns are compressed with LZ4 if the server has it, which is
-- much faster. A restore keeps the compression that it finds.
--

DO $storage$
DECLARE
	home pg_catalog.name := pg_catalog.current_schema();
BEGIN
	IF EXISTS (SELECT FROM pg_catalog.pg_settings AS s
		WHERE s.name OPERATOR(pg_catalog.=) 'default_toast_compression'
			AND 'lz4' OPERATOR(pg_catalog.=) ANY (s.enumvals)) THEN
		EXECUTE pg_catalog.format('ALTER TABLE %I.idem_keys '
			'ALTER COLUMN response_headers SET COMPRESSION lz4, '
			'ALTER COLUMN response_body SET COMPRESSION lz4, '
			'ALTER COLUMN response_bytes SET COMPRESSION lz4, '
			'ALTER COLUMN recovery_state SET COMPRESSION lz4, '
			'ALTER COLUMN error SET COMPRESSION lz4', home);
		EXECUTE pg_catalog.format('ALTER TABLE %I.idem_outbox '
			'ALTER COLUMN payload SET COMPRESSION lz4, '
			'ALTER COLUMN headers SET COMPRESSION lz4, '
			'ALTER COLUMN last_error SET COMPRESSION lz4', home);
	END IF;
END
$storage$;
