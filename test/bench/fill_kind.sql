-- A table of :keys live keys, all UUIDs of version :version, that have come one
-- by one: those of version 7 a millisecond apart, in order, those of version 4
-- at random, so that the leaves of the primary key are as full as they are then.
-- All are claims of the length of those that are measured: shorter ones would fit
-- into what is left of each page, and change all pages of the table.

CREATE EXTENSION idempotency;
ALTER TABLE idem_keys SET (autovacuum_enabled = off);

INSERT INTO idem_keys (claim_token, created_at, lease_expires_at, expires_at, attempt, state, scope, key, request_hash)
	SELECT 1, now(), now() + '1 day', now() + '1 day' + i * interval '1 us', 1, 'started', 'scope-1',
		CASE :version WHEN 7 THEN
			regexp_replace(lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - :keys + i), 12, '0'), '(.{8})(.{4})', '\1-\2')
				|| '-7' || substr(random_uuid, 16)
		ELSE random_uuid END, sha256('request')
	FROM generate_series(1, :keys::bigint) AS i, LATERAL (SELECT gen_random_uuid()::text AS random_uuid WHERE i > 0) AS r;

ANALYZE idem_keys;
