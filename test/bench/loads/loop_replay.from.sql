-- idem_claim of a completed key, 100 times in PL/pgSQL, in FROM
SELECT loop_replay_from();
