-- idem_try_advance with a stale action, ten times in PL/pgSQL, in FROM
SELECT loop_stale_from();
