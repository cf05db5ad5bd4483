-- The demo needs the extension, roles for the application and its relays, and a shop.

CREATE EXTENSION idempotency;
CREATE ROLE shop_app LOGIN;
SELECT idem_grant('shop_app'::regrole);
CREATE ROLE shop_relay LOGIN;
SELECT idem_grant_relay('shop_relay'::regrole);

CREATE TABLE orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	sku text NOT NULL,
	quantity int NOT NULL,
	placed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
GRANT SELECT, INSERT ON orders TO shop_app;

-- The answers that the clients received.
CREATE TABLE answers (
	round int,
	asked_at timestamptz,
	outcome text,
	status int,
	body text
);
GRANT INSERT ON answers TO shop_app;

-- The results of pgbench.
CREATE TABLE rates (label text, per_second int);
CREATE TABLE timings (label text, ms numeric);
CREATE VIEW percentiles AS
	SELECT label,
		round(percentile_disc(0.50) WITHIN GROUP (ORDER BY ms), 1) AS p50,
		round(percentile_disc(0.99) WITHIN GROUP (ORDER BY ms), 1) AS p99
	FROM timings GROUP BY label;
