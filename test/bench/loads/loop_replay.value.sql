-- idem_claim of a completed key, 100 times in PL/pgSQL, as a value
SELECT loop_replay_value();
