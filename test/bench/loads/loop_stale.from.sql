-- idem_try_advance with a stale action, 100 times in PL/pgSQL, in FROM
SELECT loop_stale_from();
