-- The playground needs the extension, a role for the application, a
-- table of orders for each shop, and likes for the shops without the extension.

CREATE EXTENSION idempotency;
CREATE ROLE playground LOGIN;
SELECT idem_grant('playground'::regrole);

CREATE TABLE orders_without (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	shopper text NOT NULL,
	key text NOT NULL,
	sku text NOT NULL
);
CREATE INDEX ON orders_without (shopper, key);
CREATE TABLE orders_unique (LIKE orders_without INCLUDING ALL);
CREATE UNIQUE INDEX ON orders_unique (shopper, key);
CREATE TABLE orders_with (LIKE orders_without INCLUDING ALL);

CREATE TABLE likes_without (
	shopper text PRIMARY KEY,
	active boolean NOT NULL
);

CREATE TABLE likes_unique (
	shopper text PRIMARY KEY,
	active boolean NOT NULL,
	action_id bigint NOT NULL
);

GRANT SELECT, INSERT, UPDATE ON orders_without, orders_unique, orders_with, likes_without, likes_unique
	TO playground;
