
--
-- After a restore, a promotion or a move
--

CREATE FUNCTION @extschema@.idem_raise_claim_tokens(at_least bigint)
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_raise_claim_tokens(bigint) IS
'For administrators, after a restore, a promotion or a move: from now on, claim tokens are above at_least. Never lowers them. The ids of new messages increase by the same number, and at least above the highest existing message. Does not wait or block, and a rollback does not undo it. Returns the number that new claim tokens are above. Raises 22004, and 22023 for more than half of the largest bigint.';

CREATE FUNCTION @extschema@.idem_repair_outbox()
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_repair_outbox() IS
'For administrators, after rows of idem_outbox were deleted or changed by hand: makes sure that idem_outbox_take finds the first pending message of each topic and key. Returns the number of rows that it has written, which need not mean damage. Skips messages that another transaction is writing. Changes nothing else, and never waits.';
