"""
The calls as SQL, and how steps name what is known only when they run.
"""

from primitives import MAX_RAISE

KEYS = {
    'keys': ('scope', 'key'),
    'action_versions': ('user_id', 'entity_type', 'entity_id'),
    'user_actions': ('user_id', 'entity_type', 'entity_id', 'action_type'),
    'aggregates': ('aggregate',),
    'client_sequences': ('aggregate', 'client_id'),
    'tokens': ('scope', 'token'),
    'outbox': ('id',),
}

# name of the model's method -> SQL; one %s an argument, tuples take several
CALLS = {
    'claim': 'SELECT * FROM idem_claim(%s, %s, %s, %i, %i, %i)',
    'claim_stored': 'SELECT * FROM idem_claim(%s, %s, %s, %i, %i, %i, %s)',
    'resume': 'SELECT * FROM idem_resume(%s, %i, %a::text[], %i)',
    'claim_many': 'SELECT outcome, claim_token, attempt, response_status, '
                  'response_headers, response_body, response_bytes, '
                  'recovery_point, recovery_state, lease_expires_at, '
                  'expires_at FROM idem_claim_many(%s, %a, %a::bytea[], %i, '
                  '%i)',
    'complete_many': 'SELECT completed FROM idem_complete_many('
                     '%s, %a, %a, %a::text[], NULL, %a::bigint[])',
    'complete': 'SELECT idem_complete(%s, %s, %s, %t, %s, %s)',
    'fail_claim': 'SELECT idem_fail(%s, %s, %s, %s)',
    'checkpoint': 'SELECT idem_checkpoint(%s, %s, %s, %s, %i, %s)',
    'heartbeat': 'SELECT idem_heartbeat(%s, %s, %i, %s)',
    'release': 'SELECT idem_release(%s, %s, %s)',
    'lookup': 'SELECT * FROM idem_lookup(%s, %s)',
    'forget': 'SELECT idem_forget(%s, %s)',
    'erase': 'SELECT idem_erase(%s, %s)',
    'advance': 'SELECT * FROM idem_try_advance(%s, %s, %s, %s)',
    'is_active': 'SELECT idem_is_active(%s, %s, %s, %s)',
    'states': "SELECT coalesce(string_agg(concat_ws(' ', entity_id, "
              "action_type, is_active, last_action_id), ',' ORDER BY entity_id, "
              "action_type), '') FROM idem_action_states(%s, %s, %a::text[])",
    'forget_user': 'SELECT idem_forget_user(%s)',
    'append': 'SELECT * FROM idem_try_append(%s, %s, %s, %s, %s, %s, %i)',
    'last_client_seq': 'SELECT idem_last_client_seq(%s, %s)',
    'once': 'SELECT idem_once(%s, %t, %i)',
    'once_at': 'SELECT idem_once_at(%s, %s)',
    'once_many': 'SELECT idem_once_many(%s, %a::text[], %i)',
    'publish': 'SELECT idem_publish(%s, %s, %s, %s, %i), '
               "currval('idem_outbox_ids')",
    'publish_many': 'SELECT ordinal, message_id, '
                    "currval('idem_outbox_ids') FROM idem_publish_many("
                    '%a::text[], %a::jsonb[], %a::text[], %a::jsonb[], %i)',
    'take': 'SELECT * FROM idem_outbox_take(%s, %i, %a::text[], %i)',
    'ack': 'SELECT idem_outbox_ack(%a::bigint[])',
    'nack': 'SELECT idem_outbox_nack(%s, %s, %i, %s)',
    'requeue': 'SELECT idem_outbox_requeue(%a::bigint[])',
    'extend': 'SELECT * FROM idem_outbox_extend(%a::bigint[], %i, '
              '%a::int[])',
    'give_back': 'SELECT idem_outbox_release(%a::bigint[], %a::int[])',
    'raise_tokens': 'SELECT idem_raise_claim_tokens(%s)',
    'cleanup': 'SELECT * FROM idem_cleanup()',
    'take_expired': 'SELECT ' + ', '.join(
        "(SELECT count(*) FROM idem_take_expired('%s', 10000))" % kind
        for kind in ('keys', 'tokens', 'messages')),
}
MANY = {
    'advance_many': 'SELECT should_process, last_action_id '
                    'FROM idem_try_advance_many(%s, %s, %s, %s)',
    'set_many': 'SELECT is_active, last_action_id, processed '
                'FROM idem_set_many(%s, %s, %s, %s, %s, %s)',
}
NEVER_ISSUED = 10 ** 15


def literal(value):
    if value is None:
        return 'NULL'
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, bytes):
        return "'\\x%s'::bytea" % value.hex()
    return "'%s'" % value.replace("'", "''")


def interval(value):
    return 'NULL' if value is None else "'%d microseconds'" % value


def array(value):
    return 'NULL' if value is None else \
        'ARRAY[%s]' % ', '.join(literal(v) for v in value)


def typed(value):
    """With a type, where a function is overloaded."""
    return literal(value) + ('' if isinstance(value, bytes) else '::text')


FORMS = {'%s': literal, '%i': interval, '%a': array, '%t': typed}


def flatten(args):
    for arg in args:
        if isinstance(arg, tuple):
            yield from arg
        else:
            yield arg


def compile_call(template):
    pieces, forms = [''], []
    while template:
        if template[:2] in FORMS:
            forms.append(FORMS[template[:2]])
            pieces.append('')
            template = template[2:]
        else:
            pieces[-1] += template[0]
            template = template[1:]
    return '%s'.join(pieces), forms


COMPILED = {name: compile_call(template) for name, template in CALLS.items()}


def text(name, args):
    if name == 'act':
        entity, action_type, wanted, action_id, excludes = args
        args = entity + (action_type, wanted, action_id, excludes)
        if wanted is None:
            return 'SELECT * FROM idem_toggle(%s, %s, %s, %s, %s)' % tuple(
                literal(v) for v in entity + (action_type, action_id))
        return 'SELECT * FROM idem_set(%s, %s, %s, %s, %s, %s, %s)' % (
            tuple(literal(v) for v in args[:-1]) + (array(excludes),))
    if name in ('advance_many', 'set_many'):
        columns = tuple(array(column) for column in zip(*args[0])) + tuple(
            array(column) for column in args[1:])
        return MANY[name] % columns
    template, forms = COMPILED[name]
    return template % tuple(form(arg) for form, arg in
                            zip(forms, flatten(args)))


def resolve(world, session, name, args):
    """Real tokens and ids for the names that the step uses; None: not yet."""
    if name in ('complete', 'fail_claim', 'checkpoint', 'heartbeat',
                'release'):
        return args[:-1] + (token(world, session, args[0], args[-1]),)
    if name == 'complete_many':
        return args[:-1] + ([token(world, session, (args[0], key), t)
                             for key, t in zip(args[1], args[-1])],)
    if name in ('ack', 'requeue') and args[0] is not None:
        ids = [message(world, n) for n in args[0]]
        return None if None in ids else (ids,)
    if name in ('extend', 'give_back'):
        ids = [message(world, n) for n in args[0]]
        if None in ids:
            return None
        attempts = args[-1] and [attempt(world, session, ident, n)
                                 for ident, n in zip(ids, args[-1])]
        return (ids,) + args[1:-1] + (attempts,)
    if name == 'raise_tokens':
        drawn = world.drawn()
        return (args[0] if args[0] > MAX_RAISE else args[0] + drawn[0],
                *drawn)
    if name == 'nack':
        ident = message(world, args[0])
        if ident is None:
            return None
        return (ident,) + args[1:3] + (attempt(world, session, ident,
                                               args[3]),)
    return args


def attempt(world, session, ident, offset):
    """The message's last attempt, or the one at an offset from it."""
    if offset is None:
        return None
    row = world.model.latest(('outbox', ident))[1]
    if session.tx:
        row = session.tx.writes.get(('outbox', ident), row)
    return max(row['attempt'] + offset, 0) if row else 1


def token(world, session, key, name):
    if name == 'none':
        return None
    if name == 'never':
        return NEVER_ISSUED
    row = session.tx and session.tx.writes.get(('keys',) + key) or \
        world.model.latest(('keys',) + key)[1]
    tokens = world.tokens.get(key, [])
    if name == 'current' and row:
        return row['claim_token'].value
    if name == 'foreign':
        tokens = [t for k, ts in world.tokens.items() for t in ts if k != key]
    older = [t for t in tokens if not row or t != row['claim_token'].value]
    return older[-1] if older else NEVER_ISSUED


def message(world, number):
    return world.messages[number] if number < len(world.messages) else None


def key_of(call):
    """The key of a claim, from the model's row."""
    return next(key[1:] for key in call.tx.writes if key[0] == 'keys' and
                call.tx.undo[-1][0] == key)


def label(name, answer):
    """What to count the answer under."""
    if isinstance(answer, str):
        return answer
    if name in ('claim', 'claim_stored', 'append', 'nack', 'fail_claim', 'complete',
                'release', 'once', 'advance', 'act'):
        return str(answer[0][2 if name == 'act' else 0])
    if name == 'lookup':
        return str(answer[0][0])
    if name in ('take', 'resume', 'once_many', 'extend', 'advance_many', 'set_many',
                'claim_many', 'complete_many'):
        return 'some' if answer else 'none'
    if name in ('give_back', 'forget_user'):
        return 'some' if answer[0][0] else 'none'
    return 'ok'


def settings(values):
    policy, tombstones, retention = values
    return ["SET idempotency.expired_key_policy = '%s'" % policy,
            "SET idempotency.tombstone_retention = '%dms'"
            % (tombstones // 1000),
            "SET idempotency.outbox_retention = '%s'"
            % ('0' if retention == 'none' else '7d')]
