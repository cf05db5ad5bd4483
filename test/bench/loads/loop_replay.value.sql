-- idem_claim of a completed key, ten times in PL/pgSQL, as a value
SELECT loop_replay_value();
