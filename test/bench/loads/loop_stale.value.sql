-- idem_try_advance with a stale action, ten times in PL/pgSQL, as a value
SELECT loop_stale_value();
