-- Put :keys live keys into each table: UUIDs of version 4, evenly spread over
-- those that the loads choose from at random, in ascending order.  No VACUUM: it
-- would tell of the room on each page, too little for a completed key, but
-- enough for a new claim, and send each claim to another page.

TRUNCATE idem_keys, hand_keys;
ALTER TABLE idem_keys SET (autovacuum_enabled = off);
ALTER TABLE hand_keys SET (autovacuum_enabled = off);

INSERT INTO idem_keys (claim_token, created_at, completed_at, expires_at, attempt, response_status,
		state, scope, key, request_hash, response_headers, response_body)
	SELECT 1, now(), now(), now() + '1 day' + i * interval '1 us', 1, 201, 'completed', 'scope-1',
		encode(int8send(i * (140737488355327 / :keys) * 65536 + 16384) || int8send(i - 9223372036854775807), 'hex')::uuid::text,
		sha256('request'), '{"Content-Type": "application/json"}', '{"order": 12345, "status": "created"}'
	FROM generate_series(0, :keys - 1::bigint) AS i;

INSERT INTO hand_keys SELECT * FROM idem_keys;

ANALYZE idem_keys, hand_keys;
