-- Each row is a broken promise.  Deliver what is still in the outbox first, beside messages that cannot be delivered:
-- the first take that returns nothing is the last one.
SET search_path = public, idem;
\ir ../model/hostile.sql
DO $$
BEGIN
	PERFORM deliver(relay) FROM (SELECT DISTINCT relay FROM in_hand) AS r;
	LOOP
		PERFORM take(-1);
		EXIT WHEN NOT EXISTS (SELECT FROM in_hand);
		PERFORM deliver(-1);
	END LOOP;
END
$$;

SELECT 'an effect without a completed record, or the reverse: ' || e || ' ' || k
FROM (SELECT * FROM effects WHERE scope <> 'run') AS e
	FULL JOIN (SELECT * FROM idem_keys WHERE scope IN ('one', 'two') AND state = 'completed') AS k
		ON k.scope = e.scope AND k.key = e.key AND k.claim_token = e.token
WHERE e.key IS NULL OR k.key IS NULL
UNION ALL
SELECT 'a run without its effect, or the reverse: ' || coalesce(e.key, k.key)
FROM (SELECT * FROM effects WHERE scope = 'run') AS e
	FULL JOIN (SELECT * FROM idem_keys WHERE scope = 'run') AS k ON k.key = e.key AND k.state = 'completed'
WHERE e.key IS NULL OR k.key IS NULL
UNION ALL
SELECT 'a claim with a lower token than the one before: ' || key || ' ' || token
FROM (SELECT key, token, lag(token) OVER (PARTITION BY key ORDER BY n) AS previous FROM claims) AS c
WHERE token <= previous
UNION ALL
SELECT 'a counter that fell: ' || entity || ' ' || action_id
FROM (SELECT entity, action_id, lag(action_id) OVER (PARTITION BY entity ORDER BY n) AS previous FROM intents) AS i
WHERE action_id <= previous
UNION ALL
SELECT 'another counter than the last action''s: ' || entity
FROM (SELECT entity, max(action_id) AS id FROM intents GROUP BY entity) AS i
	FULL JOIN idem_action_versions AS v ON v.entity_id = i.entity AND v.last_action_id = i.id
WHERE i.entity IS NULL OR v.entity_id IS NULL
UNION ALL
SELECT 'not what was wanted last: ' || entity
FROM (SELECT DISTINCT ON (entity) * FROM intents ORDER BY entity, n DESC) AS i
WHERE entity LIKE 'set%' AND (idem_is_active('u', 'post', entity, type) <> active
	OR active AND idem_is_active('u', 'post', entity, CASE type WHEN 'like' THEN 'dislike' ELSE 'like' END))
UNION ALL
SELECT 'not flipped once for each toggle: ' || entity
FROM (SELECT entity, count(*) % 2 = 1 AS active FROM intents WHERE entity LIKE 'toggle%' GROUP BY entity) AS i
WHERE idem_is_active('u', 'post', entity, 'like') <> active
UNION ALL
SELECT 'a sequence that differs from its events: ' || coalesce(e.aggregate, s.aggregate)
FROM (SELECT aggregate, client, count(*) AS events, max(seq) AS last FROM events GROUP BY aggregate, client) AS e
	FULL JOIN idem_client_sequences AS s
		ON s.aggregate = e.aggregate AND s.client_id = e.client AND s.last_client_seq = e.last AND e.last = e.events
WHERE e.aggregate IS NULL OR s.aggregate IS NULL
UNION ALL
SELECT 'a version that differs from the number of events: ' || coalesce(e.aggregate, a.aggregate)
FROM (SELECT aggregate, count(*) AS events FROM events GROUP BY aggregate) AS e
	FULL JOIN idem_aggregates AS a ON a.aggregate = e.aggregate AND a.version = e.events
WHERE e.aggregate IS NULL OR a.aggregate IS NULL
UNION ALL
SELECT 'a token that one side knows: ' || coalesce(s.token, t.token)
FROM seen AS s FULL JOIN (SELECT * FROM idem_tokens WHERE scope = 'form') AS t ON t.token = s.token
WHERE s.token IS NULL OR t.token IS NULL
UNION ALL
SELECT 'a message that was not applied: ' || key
FROM published JOIN applied USING (key) WHERE published.seq <> applied.seq
UNION ALL
SELECT 'a message that is not acknowledged: ' || id FROM idem_outbox WHERE state <> 'acked' AND topic <> 'hostile';
