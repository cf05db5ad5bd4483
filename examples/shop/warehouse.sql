-- The other side: a database of its own, which receives the events of the shop
-- and packs a parcel for each order.

CREATE EXTENSION idempotency;
SELECT idem_grant('shop_app'::regrole);

CREATE TABLE parcels (
	n bigint GENERATED ALWAYS AS IDENTITY,
	customer int NOT NULL,
	nth int NOT NULL,
	order_id bigint NOT NULL
);
CREATE TABLE received (
	n bigint GENERATED ALWAYS AS IDENTITY,
	message_id uuid,
	answer text,
	at timestamptz DEFAULT clock_timestamp()
);
CREATE INDEX ON received (message_id);
GRANT INSERT ON parcels TO shop_app;
GRANT SELECT, INSERT ON received TO shop_app;

-- One call is one transaction.  Each 50th order is refused at first, for both
-- copies of a delivery.
CREATE FUNCTION receive(message_id uuid, payload jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text := 'ignored';
BEGIN
	IF (payload ->> 'order')::bigint % 50 = 0 AND
		(SELECT count(*) < 2 FROM received AS r WHERE r.message_id = receive.message_id) THEN
		answer := 'refused';
	ELSIF idem_once('warehouse', message_id::text) THEN
		INSERT INTO parcels (customer, nth, order_id)
			SELECT customer, nth, "order"
			FROM jsonb_to_record(payload) AS (customer int, nth int, "order" bigint);
		answer := 'applied';
	END IF;
	INSERT INTO received (message_id, answer) VALUES (message_id, answer);
	RETURN answer;
END $$;
