
--
-- After a restore, a promotion or a move
--

CREATE FUNCTION @extschema@.idem_raise_claim_tokens(at_least bigint)
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 10000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_raise_claim_tokens(bigint) IS
'For administrators, after a restore, a promotion or a move: the claim tokens that are given from now on are above at_least. Never lowers them. The ids of new messages move on by as many, and in any case above the highest message there is. Waits for nobody, nobody waits for it, and a rollback does not undo it. Returns what new claim tokens are above. Raises 22004, and 22023 for more than half of the largest bigint.';

CREATE FUNCTION @extschema@.idem_repair_outbox()
RETURNS bigint
LANGUAGE c VOLATILE PARALLEL UNSAFE COST 100000
AS 'MODULE_PATHNAME';
COMMENT ON FUNCTION @extschema@.idem_repair_outbox() IS
'For administrators, after rows of idem_outbox were deleted or changed by hand: sees to it that idem_outbox_take finds the first pending message of each topic and key. Returns how many it has written to, which need not mean damage; messages that another transaction is writing are left out. Changes nothing else, and waits for nobody.';
