"""
The extension's functions in C, a twin in PL/pgSQL for each, and arguments for
calls.

A twin has the name, the arguments, the result columns and the planner's
properties of its function, and calls it.  So a query with twins has the same
plan, and its result is that of functions that the executor knows nothing
about.
"""

HOME, TWINS = 'idem', 'twin'

# Nothing to compare: what they return is another thing each time, or they
# change what is outside of transactions.
LEFT_OUT = ('idem_stats_reset', 'idem_raise_claim_tokens',
            'idem_cleanup_idle')

# Of these only some columns are the same each time.
STEADY = {
    'idem_monitoring_data': ['source'],
    'idem_stats_data': ['datid'],
}
# Times and random ids are shown, but nothing is computed from them, nor from
# documents that have some.
UNSTEADY_TYPES = ('timestamp with time zone', 'interval', 'uuid')
UNSTEADY_DOCUMENTS = ('idem_take_expired',)

# Types that cannot be compared with =, sorted or grouped by.
WITHOUT_ORDER = ('json', 'void')

ARGUMENTS = {
    'active': ['true', 'false'],
    'actives': ["'{{t,f}}'", "'{{t}}'"],
    'action_ids': ["'{{5,6}}'", 'ARRAY[{n} + 3, {n} + 20]'],
    'action_types': ["'{{like,dislike}}'", "'{{like}}'"],
    'attempts': ['NULL', "'{{1}}'"],
    'claim_tokens': ['NULL', 'ARRAY[{n}, 7]', "'{{7}}'"],
    'entity_ids': ["ARRAY[({n})::text, '1']", "'{{e1,e1}}'", "'{{1}}'"],
    'entity_types': ["'{{post}}'"],
    'keys': ["ARRAY['key-0000000000000000' || {n}, 'key-00000000000000002']",
             "ARRAY['key-0000000000000000' || {n} % 3, "
             "'key-0000000000000000' || ({n} + 5)]"],
    'request_hashes': ['NULL', "ARRAY['\\x01'::bytea, NULL]"],
    'response_bodies': ['NULL', "'{{a,NULL}}'"],
    'response_statuses': ["'{{200}}'", 'ARRAY[200, ({n} + 400)::int]'],
    'user_ids': ["ARRAY['u1', 'u' || {n}]", "'{{u1}}'"],
    'action_id': ['5', '{n} + 3', '{n} + 20', '100'],
    'action_type': ["'like'", "'dislike'"],
    'aggregate': ["'a1'", "'a2'"],
    'allow_gaps': ['true', 'false'],
    'attempt': ['1', 'NULL'],
    'batch_size': ['NULL', '1', '100'],
    'body': ["'{{\"a\": 1.0}}'::text", 'NULL::text', "'[{n}]'::text"],
    'claim_token': ['{n}', '{n}', 'NULL', '7'],
    'client_id': ["'c1'", "'c' || {n}"],
    'client_seq': ['1', '{n} + 1', '5'],
    'deliver_after': ['NULL', "'1 hour'"],
    'document': ["'{{\"b\": [1, {{}}], \"a\": 1e3}}'", 'to_jsonb({n})', 'NULL'],
    'entity_id': ["'1'", '({n})::text', "'e1'"],
    'entity_type': ["'post'"],
    'event_count': ['1', '2'],
    'excludes': ['NULL', "'{{dislike}}'"],
    'expected_version': ['NULL', '0', '3'],
    'handler': ["'idem_handlers.echo(jsonb)'", "'idem_handlers.place(jsonb)'"],
    'headers': ['NULL', "'{{\"h\": 1}}'"],
    'id': ['1', '{n} + 1'],
    'ids': ["'{{1,2,3}}'", 'ARRAY[{n}, 4]::bigint[]', "'{{}}'",
            'ARRAY[6, 5, {n}]::bigint[]'],
    'key': ["'key-0000000000000000' || {n}"] * 6 + [
            "'key-00000000000000002'", "'key-0000000000000000' || {n} % 3",
            "'key-0000000000000000' || ({n} + 5)", "'key-of-nobody-0001'",
            "'key-' || {n}"],
    'kind': ["'keys'", "'tokens'", "'messages'"],
    'lease': ['NULL', "'1 hour'", "'0'"],
    'max_rows': ['NULL', '1', '100'],
    'max_messages': ['100'],
    'message_key': ['NULL', "'k1'"],
    'method': ["'POST'", "'post'"],
    'name': ["'value'"],
    'older_than': ["'0'", "'1 hour'"],
    'path': ["'/'", "'/' || {n}"],
    'payload': ["'{{}}'", 'to_jsonb({n})'],
    'recovery_point': ["'charged'"],
    'request': ["'{{}}'", "'{{\"a\": 1}}'"],
    'request_hash': ['NULL', "'\\x01'::bytea", "'\\x02'::bytea"],
    'response_status': ['200', '{n} + 400'],
    'retry_after': ['NULL', "'0'", "'1 hour'"],
    'scope': ["'s'", "'s'", "'s'", "'t'"],
    'token': ["'t1'", "'t' || {n}", "'t' || {n} % 2"],
    'tokens': ["'{{t1,t9,t8,t9}}'", "ARRAY['t' || {n}, 't' || {n} % 2]",
               "'{{}}'"],
    'topics': ['NULL', "'{{orders}}'"],
    'topic': ["'orders'"],
    'ttl': ['NULL', "'1 day'", "'0'"],
    'user_id': ["'u1'", "'u' || {n}"],
    # Nobody but this session is there to be waited for.
    'wait': ['NULL', "'0'"],
}
BY_TYPE = {
    'bigint': ['1', '{n}'],
    'bigint[]': ["'{{1,2}}'"],
    'boolean': ['true'],
    'boolean[]': ["'{{t}}'"],
    'bytea': ["'\\x00ff'::bytea"],
    'bytea[]': ['NULL'],
    'integer': ['1', '{n}'],
    'integer[]': ["'{{200}}'"],
    'interval': ["'1 hour'"],
    'json': ['NULL', "'{{\"j\": [1]}}'"],
    'json[]': ['NULL'],
    'jsonb': ["'{{\"j\": [1]}}'"],
    'jsonb[]': ["'{{1}}'"],
    'text': ["'x'", "'x' || {n}", 'NULL'],
    'text[]': ["'{{x1,x2}}'"],
}
# A choice by name must fit the type: some names have several.
ONLY = {'body': ('text',), 'headers': ('jsonb', 'json'), 'token': ('text',),
        'attempt': ('integer',), 'id': ('bigint',)}


class Function:

    def __init__(self, row):
        (self.oid, self.name, self.defaults, self.is_set, self.is_volatile,
         self.arguments, columns, self.is_row) = row
        steady = STEADY.get(self.name)
        # (name, type, whether it is the same each time)
        self.columns = [(n, t, n in steady if steady
                         else t not in UNSTEADY_TYPES
                         and self.name not in UNSTEADY_DOCUMENTS)
                        for n, t in columns]
        # Whether its rows can be shown, once times are left out.
        self.is_shown = steady is None

    def call(self, rng, number):
        """A call, {s} standing for the schema; "number" for small integers."""
        values = []
        for position, (name, kind) in enumerate(self.arguments):
            left = len(self.arguments) - position
            if left <= self.defaults and rng.random() < 0.5:
                break
            values.append(argument(rng, name, kind, number))
        return '{s}.%s(%s)' % (self.name, ', '.join(values))


def argument(rng, name, kind, number):
    choices = ARGUMENTS.get(name)
    if choices is None or kind not in ONLY.get(name, (kind,)):
        choices = BY_TYPE.get(kind, ['NULL::' + kind])
    value = rng.choice(choices).format(n=number)
    if kind == 'text' and rng.random() < 0.1:
        value += ' || differential.counted()'
    return '(%s)::%s' % (value, kind)


CATALOG = '''
SELECT p.oid, p.proname::text, p.pronargdefaults, p.proretset,
	p.provolatile = 'v',
	(SELECT coalesce(json_agg(json_build_array(a.name,
			format_type(a.type, NULL)) ORDER BY a.n), '[]')
		FROM unnest(p.proargtypes::oid[], p.proargnames[1:p.pronargs])
			WITH ORDINALITY AS a (type, name, n)),
	CASE WHEN t.typtype = 'c' THEN
		(SELECT json_agg(json_build_array(a.attname,
				format_type(a.atttypid, a.atttypmod)) ORDER BY a.attnum)
			FROM pg_attribute AS a
			WHERE a.attrelid = t.typrelid AND a.attnum > 0)
	WHEN p.proallargtypes IS NOT NULL THEN
		(SELECT json_agg(json_build_array(a.name,
				format_type(a.type, NULL)) ORDER BY a.n)
			FROM unnest(p.proallargtypes, p.proargmodes, p.proargnames)
				WITH ORDINALITY AS a (type, mode, name, n)
			WHERE a.mode IN ('o', 't'))
	ELSE json_build_array(json_build_array(p.proname,
		format_type(p.prorettype, NULL))) END,
	t.typtype = 'c' OR p.proallargtypes IS NOT NULL
FROM pg_proc AS p JOIN pg_type AS t ON t.oid = p.prorettype
JOIN pg_depend AS d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass
	AND d.deptype = 'e' AND d.refobjid = (SELECT oid FROM pg_extension
		WHERE extname = 'idempotency')
WHERE p.probin IS NOT NULL AND p.prorettype <> 'internal'::regtype
	AND p.proname <> ALL (%s)
ORDER BY p.oid::regprocedure::text
'''

# One statement for each twin: all that makes a function what it is, from the
# catalog, but for its language and its body.
MAKE_TWIN = '''
SELECT format('CREATE FUNCTION twin.%%I(%%s) RETURNS %%s LANGUAGE plpgsql '
	'%%s %%s PARALLEL %%s COST %%s%%s%%s AS $twin$ #variable_conflict use_column
	BEGIN %%s; END $twin$',
	p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
	CASE p.provolatile WHEN 'i' THEN 'IMMUTABLE' WHEN 's' THEN 'STABLE'
		ELSE 'VOLATILE' END,
	CASE WHEN p.proisstrict THEN 'STRICT' ELSE '' END,
	CASE p.proparallel WHEN 's' THEN 'SAFE' WHEN 'r' THEN 'RESTRICTED'
		ELSE 'UNSAFE' END,
	p.procost, CASE WHEN p.proretset THEN ' ROWS ' || p.prorows ELSE '' END,
	CASE WHEN p.prosupport <> 0 THEN ' SUPPORT ' || p.prosupport::regproc
		ELSE '' END,
	CASE WHEN p.prorettype = 'void'::regtype THEN 'PERFORM '
		WHEN p.proretset THEN 'RETURN QUERY SELECT * FROM '
		WHEN p.prorettype = 'record'::regtype THEN
			'SELECT * INTO ' || (SELECT string_agg('$' || n, ', ')
				FROM generate_series(p.pronargs + 1,
					array_length(p.proallargtypes, 1)) AS n) || ' FROM '
		ELSE 'RETURN ' END
	|| format('%%s.%%I(%%s)', p.pronamespace::regnamespace, p.proname,
		(SELECT string_agg('$' || n, ', ')
			FROM generate_series(1, p.pronargs) AS n)))
FROM pg_proc AS p WHERE p.oid = %s
'''


def load(cursor):
    """Read the catalog, and make the twins."""
    cursor.execute(CATALOG, (list(LEFT_OUT),))
    functions = [Function(row) for row in cursor.fetchall()]
    for function in functions:
        cursor.execute(MAKE_TWIN, (function.oid,))
        cursor.execute(cursor.fetchone()[0])
    return functions
