-- A key with more messages than a take moves out of the way, all due long ago, behind one that is leased and parked.
DO $$
DECLARE
	first bigint;
BEGIN
	PERFORM idem_publish_many('{hostile}', array_fill('1'::jsonb, '{1200}'), '{key}');
	PERFORM idem_outbox_take(1200, '0', '{hostile}');
	first := id FROM idem_outbox_take(1, '1 hour', '{hostile}');
	PERFORM idem_outbox_take(1, '1 hour', '{hostile}');
	PERFORM idem_outbox_extend(ARRAY[first + 1], '10 hours', '{1}');
	PERFORM idem_outbox_ack(ARRAY[first]);
	UPDATE idem_outbox SET available_at = '2001-01-01' WHERE topic = 'hostile' AND state = 'pending' AND id > first + 1;
END
$$;
