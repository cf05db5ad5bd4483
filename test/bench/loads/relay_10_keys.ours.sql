-- relays, messages of 10 keys: idem_outbox_take of 100, idem_outbox_ack
SELECT coalesce(array_agg(id), '{}') AS ids FROM idem_outbox_take(100) \gset
SELECT idem_outbox_ack(:ids);
