"""
The oracles: conditions that must hold at any time.

Each is a query in one snapshot that finds violations; and the results of
clients must be true in every snapshot taken later.  A quick look
reads only rows that are named after a serial from "since" on.
"""

import os
from collections import defaultdict

BATCH = 5000
PORTION = 4000000           # bytes of a journal
POOL = 2000

# Events that must have happened in a run of some length.
MET = '''
    SELECT 'orders ' || count(*) || ', by handlers ' ||
           count(*) FILTER (WHERE claim_token IS NULL) ||
           ', with keys used again ' || count(*) FILTER (WHERE scope = 'brief')
    FROM orders
    UNION ALL
    SELECT 'claims ' || count(*) || ', taken over or tried again ' ||
           count(*) FILTER (WHERE attempt > 1) || ', failed ' ||
           count(*) FILTER (WHERE ended = 'failed') || ', released ' ||
           count(*) FILTER (WHERE ended = 'released')
    FROM claims
    UNION ALL SELECT 'checkpoints ' || count(*) FROM checkpoints
    UNION ALL SELECT 'actions ' || count(*) FROM actions
    UNION ALL SELECT 'users who left ' || count(*) FROM leavers
    UNION ALL
    SELECT 'events ' || count(*) || ', of twins ' ||
           count(*) FILTER (WHERE client_id = 'twins')
    FROM events
    UNION ALL
    SELECT 'effects ' || count(*) || ', with tokens used again ' ||
           count(*) FILTER (WHERE scope = 'brief')
    FROM effects
    UNION ALL
    SELECT 'messages ' || count(*) || ', with a key ' || count(lane)
    FROM applied'''

RESPONSE = "coalesce(k.response_body, convert_from(k.response_bytes, 'UTF8'))"

QUERIES = {
    # Request keys
    'more than one order for one intent': '''
        SELECT intent, count(*) FROM orders
        WHERE scope = 'shop' AND key >= %(since)s GROUP BY intent
        HAVING count(*) > 1''',
    'more than one order for one key': '''
        SELECT key, count(*) FROM orders
        WHERE scope = 'shop' AND key >= %(since)s GROUP BY key
        HAVING count(*) > 1''',
    'an order without its completed key': '''
        SELECT o.*, k.state, k.claim_token AS token_now,
               ''' + RESPONSE + ''' AS response_now
        FROM orders AS o LEFT JOIN idem_keys AS k USING (scope, key)
        WHERE o.key >= %(since)s AND o.at > %(at)s
          AND o.expires_at > clock_timestamp()
          AND (k.state IS DISTINCT FROM 'completed' OR
               k.claim_token <> o.claim_token OR
               ''' + RESPONSE + ''' IS DISTINCT FROM o.response)''',
    'a completed key without its order': '''
        SELECT k.* FROM idem_keys AS k
        WHERE k.key >= %(since)s AND k.state = 'completed' AND NOT EXISTS (
            SELECT FROM orders AS o
            WHERE o.scope = k.scope AND o.key = k.key
              AND o.response = ''' + RESPONSE + '''
              AND coalesce(o.claim_token, k.claim_token) = k.claim_token)''',
    'an order for a key that had not expired, or with an old token': '''
        SELECT * FROM (
            SELECT *, lag(expires_at) OVER k AS expiry_before,
                   lag(claim_token) OVER k AS token_before
            FROM orders WHERE scope = 'brief' AND at > %(at)s
            WINDOW k AS (PARTITION BY key ORDER BY n)) AS o
        WHERE at < expiry_before OR claim_token <= token_before''',
    'half of a transaction': '''
        SELECT k.* FROM idem_keys AS k
        WHERE k.key >= %(since)s AND k.state <> 'completed' AND NOT EXISTS (
            SELECT FROM claims AS c
            WHERE c.key = k.key AND c.claim_token = k.claim_token)''',
    'a claim without a lease that ends': '''
        SELECT * FROM idem_keys
        WHERE key >= %(since)s AND state = 'started'
          AND (lease_expires_at IS NULL OR lease_expires_at > expires_at OR
               lease_expires_at > clock_timestamp() + interval '1 second')''',
    'a claim that has vanished': '''
        SELECT c.*, k.state, k.claim_token AS token_now,
               k.attempt AS attempt_now, k.lease_expires_at AS lease_now
        FROM (SELECT DISTINCT ON (key) * FROM claims
              WHERE key >= %(since)s ORDER BY key, n DESC) AS c
             LEFT JOIN idem_keys AS k ON k.scope = 'shop' AND k.key = c.key
        WHERE (coalesce(c.ended, 'started'), c.claim_token, c.attempt)
              IS DISTINCT FROM
              (coalesce(k.state, 'released'),
               coalesce(k.claim_token, c.claim_token),
               coalesce(k.attempt, c.attempt))
           OR k.state = 'started' AND k.lease_expires_at <> c.lease_expires_at
        ''',
    'a claim that was not free, or a wrong fencing token or attempt': '''
        SELECT * FROM (
            SELECT *, lag(claim_token) OVER k AS token_before,
                   lag(attempt) OVER k AS attempt_before,
                   lag(ended) OVER k AS end_before,
                   lag(lease_expires_at) OVER k AS lease_before
            FROM claims WHERE key >= %(since)s
            WINDOW k AS (PARTITION BY key ORDER BY n)) AS c
        WHERE claim_token <= token_before
           OR end_before = 'completed'
           OR end_before IS NULL AND at < lease_before
           OR attempt <> CASE WHEN end_before = 'released' THEN 1
                              ELSE coalesce(attempt_before, 0) + 1 END''',

    # User actions
    'a counter that is not the highest action': '''
        SELECT * FROM
            (SELECT entity_type, entity_id, last_action_id
             FROM idem_action_versions WHERE entity_id >= %(pool)s) AS v
            FULL JOIN
            (SELECT entity_type, entity_id, max(action_id) FROM actions
             WHERE entity_id >= %(pool)s GROUP BY 1, 2) AS a
            USING (entity_type, entity_id)
        WHERE last_action_id IS DISTINCT FROM max''',
    'a counter that fell': '''
        SELECT * FROM (
            SELECT *, lag(action_id) OVER
                       (PARTITION BY entity_type, entity_id ORDER BY n) before
            FROM actions WHERE entity_id >= %(pool)s) AS a
        WHERE action_id <= before''',
    'a state that is not that of the last action': '''
        SELECT s.*, a.* FROM idem_user_actions AS s, LATERAL (
            SELECT * FROM actions AS a
            WHERE a.entity_type = s.entity_type AND a.entity_id = s.entity_id
              AND (a.action_type = s.action_type OR a.active)
            ORDER BY n DESC LIMIT 1) AS a
        WHERE s.entity_id >= %(pool)s
          AND s.is_active <> (a.active AND a.action_type = s.action_type)''',
    'an active state that is lost': '''
        SELECT * FROM (
            SELECT DISTINCT ON (entity_type, entity_id) * FROM actions
            WHERE entity_type <> 'advance' AND entity_id >= %(pool)s
            ORDER BY entity_type, entity_id, n DESC) AS a
        WHERE active AND NOT EXISTS (
            SELECT FROM idem_user_actions AS s
            WHERE s.entity_type = a.entity_type AND s.is_active
              AND s.entity_id = a.entity_id
              AND s.action_type = a.action_type)''',
    'a toggle that did not flip': '''
        SELECT * FROM (
            SELECT *, lag(active, 1, false) OVER
                       (PARTITION BY entity_id ORDER BY n) AS before
            FROM actions
            WHERE entity_type = 'toggle' AND entity_id >= %(pool)s) AS a
        WHERE active = before''',

    'an action without a counter': '''
        SELECT * FROM idem_user_actions AS s
        WHERE s.entity_id >= %(pool)s AND NOT EXISTS (
            SELECT FROM idem_action_versions AS v
            WHERE v.user_id = s.user_id AND v.entity_type = s.entity_type
              AND v.entity_id = s.entity_id)''',

    # Client sequences
    'a sequence with a gap or a duplicate': '''
        SELECT * FROM
            (SELECT aggregate, client_id, last_client_seq
             FROM idem_client_sequences WHERE aggregate >= %(pool)s) AS s
            FULL JOIN
            (SELECT aggregate, client_id, min(client_seq), max(client_seq),
                    count(*), count(DISTINCT client_seq) AS different
             FROM events WHERE aggregate >= %(pool)s GROUP BY 1, 2) AS e
            USING (aggregate, client_id)
        WHERE (min, max, count, different) IS DISTINCT FROM
              (1, last_client_seq, last_client_seq, last_client_seq)''',
    'versions with a gap or a duplicate': '''
        SELECT * FROM
            (SELECT aggregate, version FROM idem_aggregates
             WHERE aggregate >= %(pool)s) AS a
            FULL JOIN
            (SELECT aggregate, min(version), max(version), count(*),
                    count(DISTINCT version) AS different
             FROM events WHERE aggregate >= %(pool)s GROUP BY 1) AS e
            USING (aggregate)
        WHERE (min, max, count, different) IS DISTINCT FROM
              (1, version, version, version)''',

    # Tokens
    'an effect without its token': '''
        SELECT * FROM effects AS e
        WHERE e.token >= %(since)s AND e.at > %(at)s
          AND e.expires_at > clock_timestamp() AND NOT EXISTS (
            SELECT FROM idem_tokens AS t WHERE t.scope = e.scope
              AND t.token = e.token AND t.expires_at = e.expires_at)''',
    'a token without its effect': '''
        SELECT * FROM idem_tokens AS t
        WHERE t.token >= %(since)s AND t.scope <> 'consumer' AND NOT EXISTS (
            SELECT FROM effects AS e WHERE e.scope = t.scope
              AND e.token = t.token AND e.expires_at = t.expires_at)''',
    'an effect that happened twice': '''
        SELECT * FROM (
            SELECT *, lag(expires_at) OVER
                       (PARTITION BY scope, token ORDER BY n) AS before
            FROM effects WHERE token >= %(since)s AND at > %(at)s) AS e
        WHERE at < before''',

    # Messages
    'a message without its transaction': '''
        SELECT * FROM idem_outbox AS o WHERE NOT EXISTS (
            SELECT FROM sent AS s WHERE s.message_id = o.message_id)''',
    'a transaction without its message': '''
        SELECT * FROM sent AS s
        WHERE s.serial >= %(since)s::bigint
          AND NOT EXISTS (SELECT FROM idem_outbox AS o
                          WHERE o.message_id = s.message_id)
          AND NOT EXISTS (SELECT FROM applied AS a
                          WHERE a.message_id = s.message_id)''',
    'an acknowledged message that was not applied': '''
        SELECT * FROM idem_outbox AS o
        WHERE o.state <> 'pending' AND NOT EXISTS (
            SELECT FROM applied AS a WHERE a.message_id = o.message_id)''',
    'a message that was applied twice': '''
        SELECT message_id, count(*) FROM applied
        WHERE serial >= %(since)s::bigint GROUP BY 1 HAVING count(*) > 1''',
    'a message that was applied, but not sent': '''
        SELECT * FROM applied AS a
        WHERE a.serial >= %(since)s::bigint AND NOT EXISTS (
            SELECT FROM sent AS s WHERE s.message_id = a.message_id)''',
    'an applied message without its token': '''
        SELECT * FROM applied AS a
        WHERE a.serial >= %(since)s::bigint AND NOT EXISTS (
            SELECT FROM idem_tokens AS t
            WHERE t.scope = 'consumer' AND t.token = a.message_id::text)''',
    'messages of a key out of order': '''
        SELECT * FROM (
            SELECT *, lag(seq, 1, 0::bigint) OVER
                       (PARTITION BY lane ORDER BY n) AS before
            FROM applied
            WHERE lane IS NOT NULL AND lane >= %(pool)s) AS a
        WHERE seq <> before + 1''',
}

# Not by serial, so only when everything is looked at.
FULL = {
    'a token of a message that was not applied': '''
        SELECT * FROM idem_tokens AS t
        WHERE t.scope = 'consumer' AND NOT EXISTS (
            SELECT FROM applied AS a WHERE a.message_id = t.token::uuid)''',
}

# When all clients have come to an end, and the worker, too.
END = {
    'a request that was never completed': '''
        SELECT * FROM idem_keys WHERE state <> 'completed' ''',
    'a message that was never applied': '''
        SELECT * FROM sent AS s WHERE NOT EXISTS (
            SELECT FROM applied AS a WHERE a.message_id = s.message_id)''',
    'a message that was never acknowledged': '''
        SELECT * FROM idem_outbox WHERE state <> 'acked' ''',
    'a transaction that is still prepared': '''
        SELECT * FROM pg_prepared_xacts''',
}

# Rows that the worker should have deleted by now.
EXPIRED = '''
    SELECT (SELECT count(*) FROM idem_keys WHERE expires_at < now() - late) +
           (SELECT count(*) FROM idem_tokens WHERE expires_at < now() - late) +
           (SELECT count(*) FROM idem_outbox
            WHERE acked_at < now() - late - interval '2 seconds')
    FROM (SELECT interval '2 seconds' AS late) AS l'''

# Results of clients -> those that are not true.
TOLD = {
    'response': '''
        SELECT * FROM unnest(%s::text[], %s::text[]) AS t (key, response)
        WHERE NOT EXISTS (SELECT FROM orders AS o
            WHERE o.key = t.key AND o.response = t.response)''',
    'claimed': '''
        SELECT * FROM unnest(%s::text[], %s::bigint[]) AS t (key, token)
        WHERE NOT EXISTS (SELECT FROM claims AS c
            WHERE c.key = t.key AND c.claim_token = t.token)''',
    'completed': '''
        SELECT * FROM unnest(%s::text[], %s::bigint[]) AS t (key, token)
        WHERE NOT EXISTS (SELECT FROM orders AS o
            WHERE o.key = t.key AND o.claim_token = t.token)''',
    'acted': '''
        SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[])
            AS t (entity_type, entity_id, action_id)
        WHERE NOT EXISTS (SELECT FROM actions AS a
            WHERE a.action_id = t.action_id AND a.entity_id = t.entity_id
              AND a.entity_type = t.entity_type)''',
    'left': '''
        SELECT * FROM unnest(%s::text[], %s::text[]) AS t (user_id, nonce)
        WHERE NOT EXISTS (SELECT FROM leavers AS l
            WHERE l.user_id = t.user_id AND l.nonce = t.nonce)''',
    'raised': '''
        SELECT * FROM unnest(%s::bigint[]) AS t (token)
        WHERE token > (SELECT last_value FROM idem_claim_tokens)''',
    'appended': '''
        SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[])
            AS t (aggregate, client_id, seq)
        WHERE seq > idem_last_client_seq(aggregate, client_id)''',
    'effect': '''
        SELECT * FROM unnest(%s::text[], %s::text[]) AS t (scope, token)
        WHERE NOT EXISTS (SELECT FROM effects AS e
            WHERE e.scope = t.scope AND e.token = t.token)''',
    'published': '''
        SELECT * FROM unnest(%s::uuid[]) AS t (message_id)
        WHERE NOT EXISTS (SELECT FROM sent AS s
            WHERE s.message_id = t.message_id)''',
}

UNDONE = {
    'orders': 'SELECT * FROM orders WHERE at > %(at)s AND '
              'response = ANY (%(undone)s::text[])',
    'messages': 'SELECT * FROM sent WHERE serial >= %(since)s::bigint AND '
                'message_id::text = ANY (%(undone)s::text[])',
}

ACKED = '''
    SELECT * FROM idem_outbox
    WHERE id = ANY (%s::bigint[]) AND state <> 'acked' '''


class Journals:
    """The results of all clients, as far as they were read."""

    def __init__(self, paths):
        self.paths = paths
        self.offsets = dict.fromkeys(paths, 0)

    def read(self):
        """What is new, in portions: kind -> rows.

        Lines that the clients add meanwhile are for the next time, because the
        clients can be faster.
        """
        for path in self.paths:
            end = os.path.getsize(path) if os.path.exists(path) else 0
            while self.offsets[path] < end:
                told = self.read_portion(path)
                if not told:
                    break
                yield told

    def read_portion(self, path):
        told = defaultdict(list)
        with open(path, 'rb') as file:
            file.seek(self.offsets[path])
            data = file.read(PORTION)
        data = data[:data.rfind(b'\n') + 1]
        self.offsets[path] += len(data)
        for line in data.decode().splitlines():
            kind, *words = line.split('\t')
            told[kind].append(words)
        return told

    def start_over(self):
        self.offsets = dict.fromkeys(self.paths, 0)


class Oracles:
    """
    Each check returns what is wrong, as lines of text.  "since": the serial
    from which on to look; "at": likewise the time, for names that are used
    again.
    """

    def __init__(self, connection, since=0, at='-infinity'):
        self.cursor = connection.cursor()
        self.values = dict(since='%012d' % since, at=at,
                           pool='%012d' % (since // POOL * POOL))

    def look(self, what, query, values):
        self.cursor.execute(query, values)
        names = [column.name for column in self.cursor.description]
        return ['%s: %s' % (what, dict(zip(names, row)))
                for row in self.cursor.fetchmany(3)]

    def check_tables(self, *sets):
        return [line for queries in (QUERIES,) + sets
                for what, query in queries.items()
                for line in self.look(what, query, self.values)]

    def check_told(self, told):
        """The journals were read before these snapshots."""
        wrong = [' '.join(words) for words in told.get('violation', [])]
        for kind, query in TOLD.items():
            rows = told.get(kind, [])
            for start in range(0, len(rows), BATCH):
                columns = zip(*rows[start:start + BATCH])
                wrong += self.look('told, but not true: ' + kind, query,
                                   [list(column) for column in columns])
        acked = [word for words in told.get('acked', []) for word in words]
        wrong += self.look('acknowledged, but not so', ACKED, [acked])
        undone = [words[0] for words in told.get('undone', [])]
        for what, query in UNDONE.items():
            wrong += self.look('rolled back, but there: ' + what, query,
                               dict(self.values, undone=undone))
        return wrong
