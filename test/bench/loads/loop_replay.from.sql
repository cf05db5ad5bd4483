-- idem_claim of a completed key, ten times in PL/pgSQL, in FROM
SELECT loop_replay_from();
