-- idem_try_advance with a stale action, 100 times in PL/pgSQL, as a value
SELECT loop_stale_value();
