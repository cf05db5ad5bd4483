-- 40 customers, who place orders at the same time.

CREATE TABLE customers (
	id int PRIMARY KEY,
	orders int NOT NULL DEFAULT 0
) WITH (fillfactor = 50);
INSERT INTO customers (id) SELECT generate_series(1, 40);
GRANT SELECT, UPDATE ON customers TO shop_app;

-- The relays' notes, and a copy of the warehouse's work.
CREATE TABLE relayed (relay int, id bigint, attempt int, event text);
CREATE TABLE received (n bigint, message_id uuid, answer text, at timestamptz);
CREATE TABLE parcels (n bigint, customer int, nth int, order_id bigint);

-- The messages as the warehouse saw them: how often, and when applied.
CREATE VIEW seen AS
	SELECT m.id, m.created_at, count(r.n) AS received,
		count(*) FILTER (WHERE r.answer = 'applied') AS applied,
		min(r.at) FILTER (WHERE r.answer = 'applied') AS applied_at
	FROM idem_outbox AS m LEFT JOIN received AS r USING (message_id)
	GROUP BY m.id;
