"""
The reference model: what each function of the extension does, step by step.

To be read beside the reference in README.md.  Every function is a generator:
it yields a Wait where the real call would sleep, gets back whether the holder
ended (rather than the time ran out), and returns the answer, or raises
Refused.  Rows are dictionaries and never changed, only replaced.
"""

import os
import time
from itertools import product

from store import (NONE, ROW, SECOND, Ambiguous, LeaseWait, LockWait, Moment,
                   Refused, Store, Time, Token, Wait)

IS_PORTABLE = os.environ.get('EDITION') == 'portable'

HOUR = 3600 * SECOND
DEFAULT_TTL = 24 * HOUR
DEFAULT_LEASE = 60 * SECOND
TOKEN_TTL = 7 * 24 * HOUR
MAX_LEAD = HOUR                 # idempotency.max_action_id_lead
MAX_RAISE = 2 ** 62 - 1
MAX_ATTEMPTS = 3                # idempotency.outbox_max_attempts
BACKOFF = SECOND
MAX_RESUMED = 4                 # idempotency.max_attempts

COLUMNS = {
    'keys': ('claim_token created_at completed_at lease_expires_at resume_at '
             'expires_at attempt response_status state scope key request_hash '
             'response_headers response_body response_bytes error '
             'recovery_point recovery_state request').split(),
    'action_versions': 'last_action_id user_id entity_type entity_id'.split(),
    'user_actions': ('last_action_id updated_at is_active user_id entity_type '
                     'entity_id action_type').split(),
    'aggregates': 'version aggregate'.split(),
    'client_sequences': 'last_client_seq aggregate client_id'.split(),
    'tokens': 'expires_at used_at scope token'.split(),
    'outbox': ('id created_at available_at acked_at attempt uncounted_attempts '
               'awaiting_ack message_id state topic message_key payload headers '
               'last_error').split(),
}

LOOKUP = ('state attempt request_hash response_status response_headers '
          'response_body response_bytes error recovery_point recovery_state '
          'created_at completed_at lease_expires_at expires_at').split()


class Model(Store):

    def __init__(self):
        super().__init__()
        self.policy = 'reuse'           # idempotency.expired_key_policy
        self.tombstones = 0             # idempotency.tombstone_retention
        self.retention = TOKEN_TTL      # idempotency.outbox_retention
        self.last_token = 0             # the highest that was seen
        self.last_id = 0                # likewise, of a message
        self.moments = []               # of the call that is being made
        self.key_locks = {}             # key -> transaction, of who queues
        self.takers = []                # transactions that have taken

    def moment(self):
        moment = Moment(self.now)
        self.moments.append(moment)
        return moment

    def token_before(self, tx):
        """What the token of a new claim is above."""
        return self.last_token

    def check_writes(self, tx):
        if tx.read_only:
            raise Refused('25006')

    #
    # Request keys
    #

    def claim(self, tx, key, request_hash, ttl, lease, wait, request=None):
        self.check_writes(tx)
        key = ('keys',) + key
        while True:
            found, row, holder = self.find(tx, key)
            if found == NONE:
                return self.take_claim(tx, key, None, request_hash, ttl, lease,
                                       request)
            outcome = 'in_progress'
            shown = None
            if found == ROW:
                outcome = self.judge(tx, key, row, request_hash)
                shown = row
                if outcome == 'new':
                    if not holder:
                        return self.take_claim(tx, key, row, request_hash,
                                               ttl, lease, request)
                    outcome, shown = 'in_progress', None
            if outcome == 'in_progress' and holder and wait:
                if (yield Wait(holder, key, wait)):
                    continue
            elif outcome == 'in_progress' and key not in tx.writes and wait:
                if (yield LeaseWait(key, wait)):
                    continue
            break
        answer = dict(outcome=outcome)
        if outcome in ('replay', 'erased'):
            for column in ('response_status', 'response_headers',
                           'response_body', 'response_bytes', 'expires_at'):
                answer[column] = shown[column]
        elif outcome == 'in_progress' and shown and key not in tx.writes:
            answer['lease_expires_at'] = shown['lease_expires_at']
        return self.claim_answer(answer)

    def claim_stored(self, tx, key, request_hash, ttl, lease, wait, request):
        return (yield from self.claim(tx, key, request_hash, ttl, lease, wait,
                                      request))

    def claim_many(self, tx, scope, keys, hashes, ttl, lease):
        return (yield from self.in_order(tx, keys, [
            self.claim(tx, (scope, key), request_hash, ttl, lease, None)
            for key, request_hash in zip(keys, hashes)]))

    def complete_many(self, tx, scope, keys, statuses, bodies, tokens):
        return (yield from self.in_order(tx, keys, [
            self.complete(tx, (scope, key), status, body, None, token)
            for key, status, body, token in zip(keys, statuses, bodies,
                                                tokens)]))

    def in_order(self, tx, keys, calls):
        """Visits the keys in their order, and answers in the caller's."""
        self.check_writes(tx)
        answers = [None] * len(calls)
        for i in sorted(range(len(calls)), key=lambda i: (keys[i], i)):
            answers[i] = yield from calls[i]
        return answers

    def judge(self, tx, key, row, request_hash):
        if self.is_past(row['expires_at']):
            kept = Time(row['expires_at'].moment,
                        row['expires_at'].after + self.tombstones)
            if self.policy == 'reject' and \
                    (self.tombstones == 0 or not self.is_past(kept)):
                return 'expired'
            return 'new'
        if request_hash is not None and row['request_hash'] is not None and \
                request_hash != row['request_hash']:
            return 'hash_conflict'
        if row['state'] in ('completed', 'erased', 'failed'):
            return {'completed': 'replay', 'erased': 'erased',
                    'failed': 'new'}[row['state']]
        if key in tx.writes or not self.is_past(row['lease_expires_at']):
            return 'in_progress'
        return 'new'

    def take_claim(self, tx, key, old, request_hash, ttl, lease, request):
        moment = self.moment()
        ttl = DEFAULT_TTL if ttl is None else ttl
        lease = DEFAULT_LEASE if lease is None else lease
        row = dict.fromkeys(COLUMNS['keys'])
        row.update(claim_token=Token(self.token_before(tx)), state='started',
                   scope=key[1], key=key[2], attempt=1,
                   request_hash=request_hash, request=request, created_at=Time(moment, 0),
                   expires_at=Time(moment, ttl),
                   lease_expires_at=Time(moment, min(ttl, lease)))
        if old and not self.is_past(old['expires_at']):
            row.update(attempt=old['attempt'] + 1,
                       created_at=old['created_at'],
                       recovery_point=old['recovery_point'],
                       recovery_state=old['recovery_state'])
            if request_hash is None:
                row['request_hash'] = old['request_hash']
            if request is None:
                row['request'] = old['request']
        if row['request'] is not None:
            row['resume_at'] = row['lease_expires_at']
        self.write(tx, key, row)
        tx.claims.add(row['claim_token'])
        return self.claim_answer(dict(row, outcome='new'))

    @staticmethod
    def claim_answer(row):
        return tuple(row.get(column) for column in (
            'outcome', 'claim_token', 'attempt', 'response_status',
            'response_headers', 'response_body', 'response_bytes',
            'recovery_point', 'recovery_state', 'lease_expires_at',
            'expires_at'))

    def find_claim(self, tx, key, token):
        row, holder = self.find_latest(tx, key)
        if row is None or self.is_past(row['expires_at']):
            raise Refused('ID004')
        current = row['claim_token']
        if token is None and not (key in tx.writes and current in tx.claims):
            raise Refused('ID003')
        if token is not None and token != current.value:
            raise Refused('ID003')
        return row, holder

    def change_claim(self, tx, key, token, end, change):
        """
        Returns the new row, or None if the claim has come to that end.  What
        changes is worked out after all waits.
        """
        key = ('keys',) + key
        while True:
            row, holder = self.find_claim(tx, key, token)
            if row['state'] == end != 'started' or \
                    (row['state'], end) == ('erased', 'completed'):
                return None
            if row['state'] != 'started':
                raise Refused('ID004')
            if not holder:
                break
            yield Wait(holder, key)
        row = dict(row, state=end, **change())
        self.cap_lease(row)
        if end == 'completed':
            row.update(request=None, resume_at=None)
        elif row['request'] is not None:
            row['resume_at'] = row['lease_expires_at'] or \
                Time(self.moment(), 0)
        self.write(tx, key, row)
        return row

    @staticmethod
    def cap_lease(row):
        lease = row['lease_expires_at']
        if lease and lease.moment.low + lease.after > \
                row['expires_at'].moment.low + row['expires_at'].after:
            row['lease_expires_at'] = row['expires_at']

    def complete(self, tx, key, status, body, headers, token):
        self.check_writes(tx)
        row = yield from self.change_claim(
            tx, key, token, 'completed', lambda: dict(
                completed_at=Time(self.moment(), 0), lease_expires_at=None,
                response_status=status, response_headers=headers,
                response_body=body if isinstance(body, str) else None,
                response_bytes=body if isinstance(body, bytes) else None))
        return row is not None,

    def fail_claim(self, tx, key, error, token):
        self.check_writes(tx)
        change = dict(lease_expires_at=None)
        if error is not None:
            change['error'] = error
        row = yield from self.change_claim(tx, key, token, 'failed',
                                           lambda: change)
        return row is not None,

    def checkpoint(self, tx, key, point, state, lease, token):
        return (yield from self.renew(tx, key, lease, token, dict(
            recovery_point=point, recovery_state=state)))

    def heartbeat(self, tx, key, lease, token):
        return (yield from self.renew(tx, key, lease, token, {}))

    def renew(self, tx, key, lease, token, change):
        self.check_writes(tx)
        lease = DEFAULT_LEASE if lease is None else lease
        row = yield from self.change_claim(
            tx, key, token, 'started', lambda: dict(
                change, lease_expires_at=Time(self.moment(), lease)))
        return row['lease_expires_at'],

    def release(self, tx, key, token):
        self.check_writes(tx)
        key = ('keys',) + key
        while True:
            row, holder = self.find_latest(tx, key)
            if row is None and token is not None and \
                    0 < token <= self.last_token:
                return False,
            row, holder = self.find_claim(tx, key, token)
            if row['state'] != 'started':
                raise Refused('ID004')
            if not holder:
                break
            yield Wait(holder, key)
        self.write(tx, key, None)
        return True,

    def lookup(self, tx, key):
        row = self.visible(tx, ('keys',) + key)
        if row is None or self.is_past(row['expires_at']):
            row = {}
        return tuple(row.get(column) for column in LOOKUP)
        yield

    def forget(self, tx, key):
        self.check_writes(tx)
        key = ('keys',) + key
        while True:
            row, holder = self.find_latest(tx, key)
            if row is None:
                return False,
            if not holder:
                self.write(tx, key, None)
                return True,
            yield Wait(holder, key)

    def erase(self, tx, key):
        self.check_writes(tx)
        key = ('keys',) + key
        while True:
            row, holder = self.find_latest(tx, key)
            if row is None:
                return False,
            erased = dict(row, response_headers=None, response_body=None,
                          response_bytes=None, error=None, recovery_state=None,
                          request=None, resume_at=None)
            if row['state'] == 'completed':
                erased['state'] = 'erased'
            if erased == row:
                return False,
            if not holder:
                self.write(tx, key, erased)
                return True,
            yield Wait(holder, key)

    def resumable(self, tx, scopes):
        """What a resume without a limit would take."""
        keys = set(k for k in self.versions if k[0] == 'keys')
        keys.update(k for k in tx.writes if k[0] == 'keys')
        for key in sorted(keys):
            if tx.level == 'rc':
                row = tx.writes[key] if key in tx.writes else \
                    self.latest(key)[1]
            else:
                row = self.visible(tx, key)
            if row is None or row['request'] is None or \
                    row['attempt'] >= MAX_RESUMED or \
                    (scopes is not None and row['scope'] not in scopes) or \
                    not (key in tx.writes or key not in self.holders and
                         (tx.level == 'rc' or self.is_writable(tx, key))):
                continue
            if row['state'] == 'failed' or (
                    row['state'] == 'started' and key not in tx.writes and
                    self.is_past(row['lease_expires_at'])):
                if not self.is_past(row['expires_at']):
                    yield key, row

    def resume(self, tx, limit, lease, scopes, wait):
        """A resume that waits is one that is made when the wait ends."""
        self.check_writes(tx)
        rows = dict(self.resumable(tx, scopes))
        lease = DEFAULT_LEASE if lease is None else lease

        def accept(answer, is_dead):
            keys = [('keys',) + answered[:2] for answered in answer]
            if len(keys) != min(limit, len(rows)) or \
                    len(set(keys)) != len(keys) or not set(keys) <= set(rows):
                return 'to be resumed: %s' % list(rows)
            times = [rows[key]['resume_at'] for key in keys]
            left = [row['resume_at'] for key, row in rows.items()
                    if key not in keys]
            for place, resumed_at in enumerate(times):
                if any(later.is_before(resumed_at)
                       for later in times[place + 1:] + left):
                    return 'not the oldest first'
            for key, answered in zip(keys, answer):
                row = dict(rows[key], claim_token=Token(self.last_token),
                           state='started', error=None,
                           attempt=rows[key]['attempt'] + 1,
                           lease_expires_at=Time(self.moment(), lease))
                self.cap_lease(row)
                row['resume_at'] = row['lease_expires_at']
                if not matches(tuple(row[c] for c in (
                        'scope', 'key', 'claim_token', 'attempt', 'request',
                        'recovery_point', 'recovery_state', 'created_at',
                        'lease_expires_at')), answered):
                    return 'not this claim: %s' % row
                self.last_token = answered[2]
                self.write(tx, key, row)
                tx.claims.add(row['claim_token'])
            return None

        return accept
        yield

    #
    # User actions
    #

    def advance(self, tx, entity, action_id):
        if action_id * 1000 > self.now + MAX_LEAD:
            raise Refused('ID005')
        self.check_writes(tx)
        key = ('action_versions',) + entity
        while True:
            found, row, holder = self.find(tx, key)
            if found == ROW and row['last_action_id'] >= action_id:
                return False, row['last_action_id']
            if not holder:
                break
            yield Wait(holder, key)
        self.write(tx, key, dict(zip(COLUMNS['action_versions'],
                                     (action_id,) + entity)))
        return True, action_id

    def act(self, tx, entity, action_type, wanted, action_id, excludes):
        """idem_set, or idem_toggle where "wanted" is None."""
        processed, last = yield from self.advance(tx, entity, action_id)
        key = ('user_actions',) + entity + (action_type,)
        if not processed:
            row = tx.writes[key] if key in tx.writes else self.latest(key)[1]
            return bool(row and row['is_active']), last, False
        row = self.find_latest(tx, key)[0]
        was = bool(row and row['is_active'])
        active = not was if wanted is None else wanted
        changes = [(key, active)] if active or was or wanted is None else []
        for other in excludes or () if active else ():
            key = ('user_actions',) + entity + (other,)
            row = self.find_latest(tx, key)[0]
            if row and row['is_active']:
                changes.append((key, False))
        for key, is_active in changes:
            self.write(tx, key, dict(zip(COLUMNS['user_actions'], (
                action_id, Time(self.moment(), 0), is_active) + key[1:])))
        return active, last, True

    def advance_many(self, tx, entities, action_ids):
        self.check_action_ids(action_ids)
        return (yield from self.in_order(tx, entities, [
            self.advance(tx, entity, action_id)
            for entity, action_id in zip(entities, action_ids)]))

    def set_many(self, tx, entities, types, actives, action_ids):
        self.check_action_ids(action_ids)
        return (yield from self.in_order(tx, entities, [
            self.act(tx, *element, None)
            for element in zip(entities, types, actives, action_ids)]))

    def check_action_ids(self, action_ids):
        if any(n * 1000 > self.now + MAX_LEAD for n in action_ids):
            raise Refused('ID005')

    def is_active(self, tx, entity, action_type):
        row = self.visible(tx, ('user_actions',) + entity + (action_type,))
        return bool(row and row['is_active']),
        yield

    def states(self, tx, user, entity_type, ids):
        states = []
        for entity in sorted({(user, entity_type, id) for id in ids}):
            for action_type in ('dislike', 'like', 'share'):
                row = self.visible(tx, ('user_actions',) + entity +
                                   (action_type,))
                counter = self.visible(tx, ('action_versions',) + entity)
                if row:
                    states.append('%s %s %s %d' % (
                        entity[2], action_type, 'ft'[row['is_active']],
                        counter['last_action_id']))
        return ','.join(states),
        yield

    def forget_user(self, tx, user):
        """
        Counters that are committed as it begins, and their actions as they are
        once the counter is gone; what has come since stays whole.
        """
        self.check_writes(tx)
        deleted = 0
        for key in self.rows_now(tx, 'action_versions', user):
            if (yield from self.delete(tx, key)):
                deleted += 1
                for action in self.rows_now(tx, 'user_actions', *key[1:]):
                    deleted += yield from self.delete(tx, action)
        for action in self.rows_now(tx, 'user_actions', user):
            self.find_latest(tx, action)
        return deleted,

    def rows_now(self, tx, table, *prefix):
        """The keys of a table's rows that begin so, whatever the snapshot."""
        prefix = (table,) + prefix
        return [key for key in sorted(self.versions.keys() | tx.writes.keys())
                if key[:len(prefix)] == prefix and
                (tx.writes[key] if key in tx.writes
                 else self.latest(key)[1]) is not None]

    def delete(self, tx, key):
        """Returns whether there was such a row."""
        while True:
            row, holder = self.find_latest(tx, key)
            if row is None:
                return False
            if not holder:
                self.write(tx, key, None)
                return True
            yield Wait(holder, key)

    #
    # Client sequences
    #

    def twin_at(self, key):
        """The transaction that is in the middle of a call for this key."""
        return self.key_locks.get(key)

    def append(self, tx, aggregate, client, first, count, expected, gaps,
               wait):
        self.check_writes(tx)
        seq_key = ('client_sequences', aggregate, client)
        agg_key = ('aggregates', aggregate)
        end = first + count - 1
        old = self.append_to_snapshot(tx, agg_key, seq_key, first, end,
                                      expected, gaps)
        if IS_PORTABLE and old:
            return old
        while True:
            _, row, agg_holder = self.find(tx, agg_key)
            version = row['version'] if row else 0
            found, row, holder = self.find(tx, seq_key)
            last = row['last_client_seq'] if row else 0
            if end <= last:
                return 'duplicate', last, version
            if holder:
                if wait and (yield Wait(holder, seq_key, wait)):
                    continue
                return 'in_flight', last, version
            if first <= last:
                return 'overlap', last, version
            twin = None if agg_key in tx.writes else self.twin_at(seq_key)
            # The portable edition cannot see whether a new client's twin has
            # written anything.
            if not gaps and first != last + 1 and not (
                    IS_PORTABLE and twin and not last):
                return 'gap', last, version
            if not agg_holder and expected not in (None, version):
                return 'version_conflict', last, version
            if twin:
                if wait and (yield LockWait(twin, seq_key, wait,
                                            self.key_locks)):
                    continue
                return 'in_flight', last, version
            if not agg_holder:
                break
            # The holder is creating the aggregate.
            instead = None if version or expected in (None, 0) else \
                ('version_conflict', last, 0)
            self.key_locks[seq_key] = tx
            try:
                yield Wait(agg_holder, agg_key, instead=instead)
            finally:
                del self.key_locks[seq_key]
        self.write(tx, agg_key, dict(version=version + count,
                                     aggregate=aggregate))
        self.write(tx, seq_key, dict(last_client_seq=end, aggregate=aggregate,
                                     client_id=client))
        return 'appended', end, version + count

    def append_to_snapshot(self, tx, agg_key, seq_key, first, end, expected,
                           gaps):
        """What an old snapshot refuses, in the portable edition; or None."""
        if tx.level == 'rc' or max(self.latest(agg_key)[0],
                                   self.latest(seq_key)[0]) <= tx.snapshot:
            return None
        row = self.visible(tx, agg_key)
        version = row['version'] if row else 0
        row = self.visible(tx, seq_key)
        last = row['last_client_seq'] if row else 0
        for outcome, met in (
                ('duplicate', end <= last), ('overlap', first <= last),
                ('gap', not gaps and first != last + 1),
                ('version_conflict', expected not in (None, version))):
            if met:
                return outcome, last, version
        return None

    def last_client_seq(self, tx, aggregate, client):
        row = self.visible(tx, ('client_sequences', aggregate, client))
        return row['last_client_seq'] if row else 0,
        yield

    #
    # Once-only tokens
    #

    def once(self, tx, scope, token, ttl):
        self.check_writes(tx)
        key = ('tokens', scope, token)
        while True:
            found, row, holder = self.find(tx, key)
            if found == ROW and not self.is_past(row['expires_at']):
                return False,
            if not holder:
                break
            yield Wait(holder, key)
        ttl = TOKEN_TTL if ttl is None else ttl
        moment = self.moment()
        self.write(tx, key, dict(expires_at=Time(moment, ttl),
                                 used_at=Time(moment, 0),
                                 scope=scope, token=token))
        return True,

    def once_at(self, tx, scope, token):
        row = self.visible(tx, ('tokens', scope, token))
        return row and not self.is_past(row['expires_at']) and \
            row['used_at'] or None,
        yield

    def once_many(self, tx, scope, tokens, ttl):
        """Visits them in one order, whatever order they came in."""
        self.check_writes(tx)
        first = set()
        for token in sorted(set(tokens)):
            if (yield from self.once(tx, scope, token, ttl))[0]:
                first.add(token)
        return [(token,) for token in dict.fromkeys(tokens) if token in first]

    #
    # Outbox
    #

    def publish(self, tx, topic, payload, message_key, headers, delay):
        """Answers with a function, as take does: the ids cannot be known."""
        self.check_writes(tx)
        moment = self.moment()

        def accept(answer, is_dead):
            message_id, ident = answer[0]
            return self.write_message(tx, ident, message_id, moment, delay,
                                      topic, payload, message_key, headers)

        return accept
        yield

    def write_message(self, tx, ident, message_id, moment, delay,
                      topic, payload, message_key, headers):
        """A new one; returns what is wrong with its id, if anything."""
        if ('outbox', ident) in self.versions:
            return 'this id exists'
        if ident <= self.last_id:
            return 'this id has been passed'
        self.last_id = ident
        self.write(tx, ('outbox', ident), dict(
            id=ident, created_at=Time(moment, 0),
            available_at=Time(moment, delay or 0), acked_at=None,
            attempt=0, uncounted_attempts=0, awaiting_ack=None, message_id=message_id,
            state='pending', topic=topic, message_key=message_key,
            payload=payload, headers=headers, last_error=None))

    def publish_many(self, tx, topics, payloads, message_keys, headers, delay):
        self.check_writes(tx)
        count = 0 if [] in (topics, payloads) else \
            max(len(topics), len(payloads))
        moments = [self.moment() for _ in range(count)]
        topics = topics * count if len(topics) == 1 else topics

        def accept(answer, is_dead):
            if [row[0] for row in answer] != list(range(1, count + 1)):
                return 'not these ordinals'
            for ordinal, message_id, last in answer:
                n, ident = ordinal - 1, last - count + ordinal
                wrong = self.write_message(
                    tx, ident, message_id, moments[n], delay,
                    topics[n], payloads[n],
                    message_keys and message_keys[n], headers and headers[n])
                if wrong:
                    return wrong

        return accept
        yield

    def outbox(self, tx):
        """The messages that the snapshot sees, in order."""
        keys = set(k for k in self.versions if k[0] == 'outbox')
        keys.update(k for k in tx.writes if k[0] == 'outbox')
        for key in sorted(keys):
            row = self.visible(tx, key)
            if row:
                yield key, row

    def takeable(self, tx, topics):
        """
        What a take without a limit would take or, after the last attempt,
        declare dead, as lists that each leave in order; and those keys that
        come to a message without a key, each by itself.  What an old snapshot
        does not see stops those behind it.
        """
        lanes, stopped, left = {}, set(), set()
        visible = dict(self.outbox(tx))
        for key in sorted(visible.keys() | self.table('outbox').keys()):
            row = visible.get(key)
            seen = row is not None and row['state'] == 'pending'
            if not seen and tx.level != 'rc' and key not in tx.writes:
                row = self.latest(key)[1]
            if row is None or row['state'] != 'pending' or \
                    (topics is not None and row['topic'] not in topics):
                continue
            lane = (row['topic'], row['message_key'])
            if row['message_key'] is None:
                lane = key
            if lane in stopped:
                continue
            if seen and lane != key and not self.is_in_lane(tx, key):
                left.add(lane)
                continue
            if lane in left:
                if self.stands_behind():
                    stopped.add(lane)
                    continue
                left.remove(lane)       # it is the head, for those behind it
            if not (seen and self.is_past(row['available_at']) and
                    self.is_writable(tx, key)):
                stopped.add(lane)
                continue
            lanes.setdefault(lane, []).append((key, row))
            if max(MAX_ATTEMPTS // 2, 1) <= attempts(row) < MAX_ATTEMPTS:
                stopped.add(lane)
        return lanes

    def is_in_lane(self, tx, key):
        """Is what an old snapshot sees as pending still there?"""
        row = tx.writes[key] if key in tx.writes else self.latest(key)[1]
        return row is not None and row['state'] == 'pending'

    def stands_behind(self):
        """
        Does a message stand behind those that have left its lane since the
        snapshot was taken?  It does where that sees it as parked.
        """
        raise Ambiguous('an old snapshot sees what has left the lane')

    def may_pass(self, tx, message):
        """
        May a take leave messages of this one's lane?  What a transaction that
        has taken before leaves in a lane, until it ends, may be in the way of
        others there, at the head or behind it: it removes signposts, and parks
        messages.  And an old snapshot sees those no more.  It has been in
        lanes of its topics only.
        """
        return any(theirs is None or message['topic'] in theirs
                   for taker, theirs in self.takers if taker is not tx and (
                       not taker.level_of_all.ended or
                       tx.level != 'rc' and (taker.ended or 0) >= tx.began))

    def check_signpost(self, tx, row):
        """
        A dead message may be what tells takes to look at its lane, and one
        that nobody has leased may have been parked; who writes to it waits for
        a take that has changed that.
        """
        if row['message_key'] is not None and self.may_pass(tx, row) and (
                row['state'] == 'dead' or not row['awaiting_ack'] or
                self.is_past(row['available_at'])):
            raise Ambiguous('a take may have written to it')

    def take(self, tx, limit, lease, topics, wait):
        """
        A take that waits is one that is made when the wait ends.

        Chance decides which messages come if there are more than "limit", so
        the answer is a function that accepts or refuses the real one, and
        takes it over.  It calls is_dead(id) where chance has decided.
        """
        self.check_writes(tx)
        lanes = self.takeable(tx, topics)
        self.takers.append((tx, topics))

        def accept(answer, is_dead):
            got = {answered[0]: answered for answered in answer}
            order = [answered[0] for answered in answer]
            for lane in lanes.values():
                ids = [key[1] for key, row in lane
                       if attempts(row) < MAX_ATTEMPTS]
                taken = [ident for ident in order if ident in ids]
                if taken != ids[:len(taken)]:
                    return 'out of order: %s of %s' % (taken, ids)
                head = lane[0][1]
                passed = head['message_key'] is not None and \
                    self.may_pass(tx, head)
                # The portable edition leaves some to the next take; see progress().
                if len(order) < limit and taken != ids and not passed \
                        and not IS_PORTABLE:
                    return 'left behind: %s of %s' % (ids[len(taken):], ids)
                for key, row in lane:
                    ident = key[1]
                    if ident in got:
                        row = dict(row, attempt=row['attempt'] + 1,
                                   awaiting_ack=True,
                                   available_at=Time(self.moment(), lease))
                        if not matches(tuple(row[c] for c in (
                                'id', 'message_id', 'topic', 'message_key',
                                'payload', 'headers', 'attempt',
                                'created_at')), got.pop(ident)):
                            return 'not this message: %s' % row
                        self.write(tx, key, row)
                    elif attempts(row) >= MAX_ATTEMPTS:
                        must = len(order) < limit and not passed or \
                            any(later > ident for later in taken)
                        if must or is_dead(ident):
                            self.write(tx, key, dict(
                                row, state='dead', last_error=row['last_error']
                                or 'The last lease expired.'))
            for (key, row), (other, earlier) in product(
                    [lane[0] for lane in lanes.values()], repeat=2):
                if row['message_key'] is earlier['message_key'] is None and \
                        row['topic'] == earlier['topic'] and \
                        key[1] in order and other[1] not in order and \
                        attempts(earlier) < MAX_ATTEMPTS and \
                        earlier['available_at'].is_before(row['available_at']):
                    return 'passed over: %s' % earlier
            if got or len(order) > limit or len(set(order)) != len(order):
                return 'must not be taken: %s' % (list(got) or order)
            return None

        return accept
        yield

    def ack(self, tx, idents):
        self.check_writes(tx)
        acked = 0
        for ident in sorted(idents):
            key = ('outbox', ident)
            while True:
                row, holder = self.find_latest(tx, key)
                if row is None or row['state'] == 'acked':
                    break
                if not holder:
                    self.check_signpost(tx, row)
                    acked += 1
                    self.write(tx, key, None if self.retention == 0 else dict(
                        row, state='acked', acked_at=Time(self.moment(), 0)))
                    break
                yield Wait(holder, key)
        return acked,

    def nack(self, tx, ident, error, pause, attempt):
        self.check_writes(tx)
        key = ('outbox', ident)
        while True:
            row, holder = self.find_latest(tx, key)
            if row is None or row['state'] == 'acked' or \
                    attempt not in (None, row['attempt']) or \
                    attempt is not None and row['awaiting_ack'] is None:
                return 'lost',
            if row['state'] == 'dead':
                return 'dead',
            if not holder:
                break
            yield Wait(holder, key)
        self.check_signpost(tx, row)
        state = 'pending' if attempts(row) < MAX_ATTEMPTS else 'dead'
        moment = self.moment()
        available = Time(moment, pause or 0)
        if pause is None:
            backoff = BACKOFF * 2 ** max(attempts(row) - 1, 0)
            available = Time(moment, backoff // 2, backoff)
        self.write(tx, key, dict(row, state=state, available_at=available,
                                 awaiting_ack=row['awaiting_ack'] and False,
                                 last_error=row['last_error']
                                 if error is None else error))
        return state,

    def requeue(self, tx, idents):
        self.check_writes(tx)
        count = 0
        if idents is None:
            idents = [key[1] for key, row in self.outbox(tx)
                      if row['state'] == 'dead']
        for ident in sorted(idents):
            key = ('outbox', ident)
            while True:
                row, holder = self.find_latest(tx, key)
                if row is None or row['state'] != 'dead':
                    break
                if not holder:
                    self.check_signpost(tx, row)
                    count += 1
                    self.write(tx, key, dict(
                        row, state='pending', uncounted_attempts=row['attempt'],
                        awaiting_ack=None, available_at=Time(self.moment(), 0)))
                    break
                yield Wait(holder, key)
        return count,

    def extend(self, tx, idents, lease, attempts):
        def longer(row):
            return dict(row, available_at=Time(self.moment(), lease))

        held = yield from self.write_held(tx, idents, attempts, longer)
        return [(ident,) for n, ident in enumerate(idents) if n in held]

    def give_back(self, tx, idents, attempts):
        def untried(row):
            return dict(row, uncounted_attempts=row['uncounted_attempts'] + 1,
                        awaiting_ack=None, available_at=Time(self.moment(), 0))

        held = yield from self.write_held(tx, idents, attempts, untried)
        return len(held),

    def write_held(self, tx, idents, attempts, change):
        """Changes what is held; answers with the places of those."""
        self.check_writes(tx)
        held = set()
        if attempts is not None and len(attempts) == 1:
            attempts = attempts * len(idents)
        for place in sorted(range(len(idents)), key=idents.__getitem__):
            key = ('outbox', idents[place])
            while True:
                row, holder = self.find_latest(tx, key)
                if row is None or row['state'] != 'pending' or \
                        not row['awaiting_ack']:
                    break
                if self.is_past(row['available_at']) if attempts is None \
                        else row['attempt'] != attempts[place]:
                    break
                if not holder:
                    self.check_signpost(tx, row)
                    held.add(place)
                    self.write(tx, key, change(row))
                    break
                yield Wait(holder, key)
        return held

    #
    # Recovery
    #

    def raise_tokens(self, tx, at_least, token, ident):
        """
        "token" and "ident" are the last ones that were drawn, for whatever.
        No rollback takes it back.
        """
        if at_least > MAX_RAISE:
            raise Refused('22023')
        self.check_writes(tx)
        self.last_id = ident + max(at_least - token, 0)
        self.last_token = max(at_least, token)
        return self.last_token,
        yield

    #
    # Cleanup
    #

    def cleanup(self, tx):
        self.check_writes(tx)
        self.takers.append((tx, None))      # it mends lanes, too
        keeps = dict(keys=self.tombstones if self.policy == 'reject' else 0,
                     tokens=0, outbox=self.retention)
        counts = dict.fromkeys(keeps, 0)
        for key in set(self.versions) | set(tx.writes):
            if key[0] not in keeps:
                continue
            row = self.visible(tx, key)
            ends = row and row['acked_at' if key[0] == 'outbox'
                               else 'expires_at']
            if ends and self.is_writable(tx, key) and self.is_past(
                    Time(ends.moment, ends.after + keeps[key[0]],
                         ends.at_most + keeps[key[0]])):
                counts[key[0]] += 1
                self.write(tx, key, None)
        counts = tuple(counts.values())

        def accept(answer, is_dead):
            """What lanes needed of messages that were deleted goes, too."""
            if answer[0][:2] != counts[:2] or answer[0][2] < counts[2]:
                return 'not that many: %s' % (counts,)

        return accept if self.retention == 0 else counts
        yield

    # All kinds, one after another
    take_expired = cleanup


def attempts(row):
    """
    How often the message was taken since it was published or requeued, and not
    given back.
    """
    return row['attempt'] - row['uncounted_attempts']


def is_row(table, row, found):
    """
    Is this the row?  A message that has stood behind another of its key may be
    available from when that left only, and a signpost of its key is from then,
    or from when the next message is.
    """
    wanted = dict(row)
    if table == 'outbox' and row['message_key'] is not None:
        available_at = found[COLUMNS[table].index('available_at')]
        earliest = row['available_at'].moment.low + row['available_at'].after
        now = time.time_ns() // 1000
        if row['state'] != 'pending' or earliest < available_at <= now:
            wanted['available_at'] = available_at
    return matches(tuple(wanted[c] for c in COLUMNS[table]), found)


def matches(expected, found):
    """Is this the answer, or row?  Pins down times and tokens."""
    if isinstance(expected, (tuple, list)):
        return len(expected) == len(found) and \
            all([matches(e, f) for e, f in zip(expected, found)])
    if isinstance(expected, (Time, Token)):
        return found is not None and expected.meet(found)
    return expected == found
