"""
Random statements around calls, with {s} for the schema that the calls go to.

Their results depend only on columns that are the same each time; other columns
are shown, or compared with null.  If calls write, their order matters, too.
It depends on the plan, which is the same for a function and its twin.
"""

from functions import WITHOUT_ORDER

INTEGERS = ('integer', 'bigint')
MAX_DEPTH = 3


class Column:

    def __init__(self, sql, kind, steady=True):
        self.sql, self.kind, self.steady = sql, kind, steady


class Source:
    """Something in FROM: its alias and columns, and whether its whole row can
    be shown and computed with."""

    def __init__(self, sql, alias, columns, shown, lateral='LATERAL '):
        self.sql, self.alias, self.columns = sql, alias, columns
        self.shown, self.lateral = shown, lateral


class Builder:

    def __init__(self, rng, functions):
        self.rng, self.functions, self.aliases = rng, functions, 0
        # Few functions for each statement, so that calls meet each other.
        self.few = rng.sample(functions, min(len(functions),
                                             rng.choice((1, 2, 3))))

    def chance(self, share):
        return self.rng.random() < share

    def alias(self, letter):
        self.aliases += 1
        return '%s%d' % (letter, self.aliases)

    # Expressions

    def number(self, sources):
        """A small integer, of the sources if there is one."""
        columns = [c for s in sources for c in s.columns if c.kind == 'small']
        if columns and self.chance(0.8):
            return self.rng.choice(columns).sql
        return str(self.rng.randint(1, 4))

    def call(self, sources, function=None):
        function = function or self.rng.choice(self.few)
        return function.call(self.rng, self.number(sources))

    def shown(self, sources, depth):
        """(SQL, type) to look at."""
        rng = self.rng
        source = rng.choice(sources)
        way = rng.random()
        if way < 0.2 and source.shown:
            return rng.choice((
                ('%s', 'row'), ('%s::text', 'row'), ('%s IS NULL', 'boolean'),
                ('row_to_json(%s)::text', 'row'), ('(%s).*', 'row'),
                ('%s IS NOT NULL', 'boolean')))[0] % source.alias
        if way < 0.3:
            return self.value_of_call(sources)
        if way < 0.4 and depth < MAX_DEPTH:
            return '(%s)' % self.scalar(sources, depth + 1)
        if way < 0.45:
            return 'generate_series(1, %s)' % self.number(sources)
        if way < 0.5:
            return 'CASE WHEN %s THEN %s END' % (
                self.condition(sources, depth), self.key(sources))
        column = rng.choice(source.columns)
        if not column.steady or column.kind in WITHOUT_ORDER or \
                self.chance(0.5):
            return column.sql
        return self.computed(column)

    def value_of_call(self, sources):
        function = self.rng.choice(self.few)
        call = self.call(sources, function)
        if not function.is_shown:
            return 'count(*) OVER ()'
        if function.is_row and self.chance(0.7):
            name, _, _ = self.rng.choice(function.columns)
            return '(%s).%s' % (call, name)
        return call if self.chance(0.7) else '(%s)::text' % call

    def computed(self, column):
        """Something of a steady column that can be sorted by."""
        sql, kind = column.sql, column.kind
        return self.rng.choice({
            'text': ['%s', 'upper(%s)', "%s || '!'", 'length(%s)',
                     "coalesce(%s, '-')", "%s LIKE '%%e%%'", "%s = 'new'",
                     'md5(%s)', "nullif(%s, 'started')"],
            'boolean': ['%s', 'NOT %s', '%s::int', 'coalesce(%s, false)'],
            'bytea': ['%s', 'length(%s)', "encode(%s, 'hex')"],
            'json': ['%s::text', '%s IS NULL'],
            'void': ['1'],
            'row': ['1', '%s IS NULL'],
        }.get(kind, ['%s', '%s + 1', '%s %% 3', '-%s', '%s::text', '%s > 2',
                     'coalesce(%s, 0)']
              if kind in INTEGERS + ('small',) else ['%s::text'])) \
            .replace('%s', sql).replace('%%', '%')

    def steady_columns(self, sources):
        return [c for s in sources for c in s.columns if c.steady]

    def key(self, sources):
        """Something to sort, group and compare by."""
        columns = self.steady_columns(sources)
        return self.computed(self.rng.choice(columns)) if columns else '1'

    def condition(self, sources, depth):
        rng = self.rng
        source = rng.choice(sources)
        way = rng.random()
        if way < 0.15 and source.shown:
            return rng.choice((
                '%s IS NOT NULL', '%s IS NULL', 'length(%s::text) > 0',
                '%s IS DISTINCT FROM NULL', '(%s = %s) IS NOT FALSE')) \
                .replace('%s', source.alias)
        if way < 0.3 and depth < MAX_DEPTH:
            return '%sEXISTS (%s)' % (
                rng.choice(('', 'NOT ')), self.select(sources, depth + 1)[0])
        if way < 0.4 and depth < MAX_DEPTH:
            return "(%s)::text IS NOT DISTINCT FROM '%s'" % (
                self.key(sources), rng.choice(('new', 'started', '1')))
        if way < 0.5:
            return 'random() %s 2' % rng.choice('<>')
        if way < 0.6:
            columns = [c for s in sources for c in s.columns]
            return '%s IS %sNULL' % (rng.choice(columns).sql,
                                     rng.choice(('', 'NOT ')))
        booleans = [f for f in self.few if not f.is_row and not f.is_set and
                    f.columns[0][1] == 'boolean']
        if way < 0.75 and booleans:
            return self.call(sources, rng.choice(booleans))
        return "(%s)::text %s '%s'" % (
            self.key(sources), rng.choice(('=', '<>', '>', '<=')),
            rng.choice(('new', 'started', '1', 't', 'replay')))

    def scalar(self, outer, depth):
        """A subquery of one row and column."""
        sources = self.sources(outer, depth, 1)
        sql = 'SELECT %s FROM %s' % (self.rng.choice(
            (self.key(sources), 'count(*)', "string_agg((%s)::text, ',')" %
             self.key(sources))), self.joined(sources))
        if self.chance(0.4):
            sql += ' WHERE ' + self.condition(sources + outer, depth)
        return 'SELECT x FROM (%s) AS x (x) LIMIT 1' % sql

    # FROM

    def function_source(self, outer):
        function = self.rng.choice(self.few)
        alias = self.alias('f')
        columns = [(n, t, steady) for n, t, steady in function.columns]
        if not function.is_row:
            columns = [('v', columns[0][1], columns[0][2])]
        sql = self.call(outer, function)
        shown = function.is_shown and function.is_row
        way = self.rng.random()
        names = ''
        if way < 0.1:
            sql += ' WITH ORDINALITY'
            columns.append(('o', 'bigint', True))
            shown = function.is_shown
            names = '(%s)' % ', '.join(n for n, _, _ in columns)
        elif way < 0.2:
            sql = 'ROWS FROM (%s, generate_series(1, 2))' % sql
            columns.append(('g', 'small', True))
            shown = function.is_shown
            names = '(%s)' % ', '.join(n for n, _, _ in columns)
        elif not function.is_row:
            names = '(v)'
        return Source('%s AS %s %s' % (sql, alias, names), alias,
                      [Column('%s.%s' % (alias, n), t, steady)
                       for n, t, steady in columns
                       if steady or function.is_shown], shown)

    def source(self, outer, depth):
        way = self.rng.random()
        if way < 0.5:
            return self.function_source(outer)
        if way < 0.7 and depth < MAX_DEPTH:
            sql, columns = self.select(outer, depth + 1)
            alias = self.alias('q')
            names = ['c%d' % i for i in range(len(columns))]
            return Source(
                '(%s) AS %s (%s)' % (sql, alias, ', '.join(names)), alias,
                [Column('%s.%s' % (alias, n), c.kind, c.steady)
                 for n, c in zip(names, columns)], True)
        alias = self.alias('n')
        if way < 0.85:
            return Source('differential.numbers AS ' + alias, alias,
                          [Column(alias + '.n', 'small'),
                           Column(alias + '.w', 'text')], True, '')
        return Source(
            "(VALUES (1, 'new'), (2, 'a'), (1, 'started')) AS %s (n, w)" %
            alias, alias, [Column(alias + '.n', 'small'),
                           Column(alias + '.w', 'text')], True)

    def sources(self, outer, depth, least=1):
        """What stands in FROM; each may refer to those before."""
        sources = []
        if depth == 0 and self.chance(0.3):
            return [self.function_source(outer)]
        for _ in range(self.rng.choice((least, least, 2, 3))):
            sources.append(self.source(outer + sources, depth))
        return sources

    def joined(self, sources):
        sql = sources[0].sql
        for i, source in enumerate(sources[1:]):
            before = sources[:i + 1]
            way = self.rng.random()
            if way < 0.4:
                sql += ' CROSS JOIN %s%s' % (source.lateral, source.sql)
            elif way < 0.5:
                sql += ' JOIN %s%s ON %s' % (
                    source.lateral, source.sql, self.condition(before + [source], MAX_DEPTH))
            elif way < 0.85:
                sql += ' LEFT JOIN %s%s ON %s' % (
                    source.lateral, source.sql, self.rng.choice((
                        'true', self.condition([source], MAX_DEPTH),
                        self.equal(before, source))))
            else:
                sql += ' JOIN %s%s ON %s' % (
                    source.lateral, source.sql, self.equal(before, source))
        return sql

    def equal(self, before, source):
        return '(%s)::text = (%s)::text' % (self.key(before),
                                            self.key([source]))

    # SELECT

    def select(self, outer, depth):
        """(SQL, columns as Column of what comes out)"""
        sources = self.sources(outer, depth)
        from_ = ' FROM ' + self.joined(sources)
        if self.chance(0.5):
            from_ += ' WHERE ' + ' AND '.join(
                self.condition(sources + outer, depth)
                for _ in range(self.rng.choice((1, 1, 2))))
        way = self.rng.random()
        if way < 0.3:
            sql, columns = self.grouped(sources, from_)
        elif way < 0.45:
            sql, columns = self.windowed(sources, from_)
        else:
            sql, columns = self.listed(sources, from_, depth)
        if self.chance(0.15):
            sql += ' LIMIT %d' % self.rng.randint(0, 3)
        if self.chance(0.15):
            sql += ' OFFSET %d' % self.rng.randint(0, 1)
        return sql, columns

    def listed(self, sources, from_, depth):
        keys = [self.key(sources) for _ in range(self.rng.randint(1, 2))]
        columns = [Column('', 'text') for _ in keys]
        out = ['(%s)::text' % key for key in keys]
        distinct = self.chance(0.15)
        if not distinct and depth == 0:
            for _ in range(self.rng.randint(0, 3)):
                out.append(self.shown(sources, depth))
                columns.append(Column('', 'void', False))
        sql = 'SELECT %s%s%s' % ('DISTINCT ' if distinct else '',
                                 ', '.join(out), from_)
        if self.chance(0.4):
            sql += ' ORDER BY 1%s' % self.rng.choice((
                '', ' DESC', ' NULLS FIRST', ', ' + (
                    '1' if distinct else self.key(sources))))
        return sql, columns

    def grouped(self, sources, from_):
        rng = self.rng
        keys = [self.key(sources) for _ in range(rng.randint(1, 2))]
        keys = ['(%s)::text' % key for key in dict.fromkeys(keys)]
        form = rng.choice(('%s', 'ROLLUP (%s)', 'CUBE (%s)',
                           'GROUPING SETS ((), (%s))'))
        out = keys + [rng.choice((
            'count(*)', 'count(%s)' % self.key(sources),
            "string_agg((%s)::text, ',' ORDER BY (%s)::text)" % (
                self.key(sources), self.key(sources)),
            'max((%s)::text)' % self.key(sources),
            'count(*) FILTER (WHERE %s)' % self.condition(sources, MAX_DEPTH),
            'grouping(%s)' % keys[0]))]
        columns = [Column('', 'text') for _ in keys] + \
            [Column('', 'other')]
        sql = 'SELECT %s%s GROUP BY %s' % (', '.join(out), from_,
                                           form % ', '.join(keys))
        if self.chance(0.3):
            sql += ' HAVING count(*) %s 1' % rng.choice(('>', '<=', '>='))
        if self.chance(0.3):
            sql += ' ORDER BY 1'
        return sql, columns

    def windowed(self, sources, from_):
        rng = self.rng
        key = self.key(sources)
        out = ['(%s)::text' % key] + [rng.choice((
            'row_number() OVER (ORDER BY %s)', 'rank() OVER (ORDER BY %s)',
            'lag((%s)::text) OVER ()', 'count(*) OVER (PARTITION BY %s)',
            'first_value((%s)::text) OVER (ORDER BY (%s)::text '
            'ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)',
            "string_agg((%s)::text, ',') OVER (ORDER BY (%s)::text)"))
            .replace('%s', key) for _ in range(rng.randint(1, 2))]
        return 'SELECT %s%s' % (', '.join(out), from_), \
            [Column('', 'text')] + [Column('', 'other') for _ in out[1:]]

    def query(self):
        sql = self.select([], 0)[0]
        way = self.rng.random()
        if way < 0.1:
            alias = self.alias('w')
            sql = 'WITH %s AS %sMATERIALIZED (%s) SELECT count(*) FROM %s ' \
                'AS a, %s AS b UNION ALL SELECT count(*) FROM %s' % (
                    alias, self.rng.choice(('', 'NOT ')), sql, alias, alias,
                    alias)
        elif way < 0.15:
            sql = '(%s) UNION ALL (%s)' % (sql, sql)
        return sql


def statements(rng, functions):
    """The statements of one transaction, and whether rows have an order."""
    while True:
        builder = Builder(rng, functions)
        form = rng.choices(list(FORMS), list(FORMS.values()))[0]
        run = form(builder)
        if any('{s}' in sql for sql in run):
            return settings(rng) + run, form is not in_parallel


def settings(rng):
    before = []
    if rng.random() < 0.1:
        before.append('SET TRANSACTION ' + rng.choice((
            'READ ONLY', 'ISOLATION LEVEL REPEATABLE READ',
            'ISOLATION LEVEL SERIALIZABLE')))
    before += ['SET LOCAL enable_%s = off' % node for node in (
        'hashjoin', 'mergejoin', 'nestloop', 'material', 'memoize', 'hashagg',
        'sort') if rng.random() < 0.15]
    if rng.random() < 0.3:
        # In the claims' own transaction no token is needed.
        before.append("SELECT {s}.idem_claim('s', 'key-0000000000000000' || n) "
                      "FROM generate_series(6, 9) AS n")
    return before


def explained(builder, sql):
    return ['EXPLAIN (VERBOSE) ' + sql] if builder.chance(0.4) else []


def plainly(builder):
    sql = builder.query()
    return explained(builder, sql) + [sql]


def in_parallel(builder):
    return ['SET LOCAL parallel_setup_cost = 0',
            'SET LOCAL parallel_tuple_cost = 0',
            'SET LOCAL min_parallel_table_scan_size = 0',
            'SET LOCAL {parallel} = on'] + plainly(builder)


def by_cursor(builder):
    sql = builder.query()
    return explained(builder, sql) + ['DECLARE c %sCURSOR FOR %s' % (
        builder.rng.choice(('', 'SCROLL ', 'NO SCROLL ')), sql)] + [
            builder.rng.choice((
                'FETCH c', 'FETCH 2 FROM c', 'FETCH BACKWARD 1 FROM c',
                'FETCH ABSOLUTE 1 FROM c', 'MOVE ABSOLUTE 0 IN c',
                'FETCH LAST c', 'FETCH PRIOR c', 'FETCH RELATIVE 0 FROM c',
                'FETCH ALL FROM c', 'MOVE FORWARD 1 IN c',
                'FETCH BACKWARD ALL FROM c'))
            for _ in range(builder.rng.randint(2, 6))]


def prepared(builder):
    sql = builder.query().replace(
        'differential.numbers AS',
        '(SELECT * FROM differential.numbers WHERE n <= $1) AS')
    return ["SET LOCAL plan_cache_mode = 'force_%s_plan'" %
            builder.rng.choice(('generic', 'generic', 'custom')),
            'PREPARE q (int) AS ' + sql] + \
        explained(builder, 'EXECUTE q (3)') + \
        ['EXECUTE q (3)', 'EXECUTE q (2)', 'EXECUTE q (4)', 'DEALLOCATE q']


def named(builder):
    """A subquery, with names x0, x1 ... for its columns."""
    sql, columns = builder.select([], 1)
    return '(%s) AS x (%s)' % (sql, ', '.join(
        'x%d' % i for i in range(len(columns))))


def by_view(builder):
    return ['CREATE TEMP VIEW v AS SELECT * FROM ' + named(builder),
            "SELECT pg_get_viewdef('v')", 'TABLE v'] + \
        explained(builder, 'TABLE v') + \
        ['SELECT count(*) FROM v AS a WHERE a IS NOT NULL',
         'SELECT count(a) FROM v AS a, generate_series(1, 2)']


def stored(builder):
    source = named(builder)
    return ['CREATE TEMP TABLE r AS SELECT * FROM ' + source, 'TABLE r',
            'INSERT INTO r SELECT * FROM %s RETURNING *' % source,
            'UPDATE differential.numbers AS n SET w = x.x0::text FROM %s '
            'WHERE n.w <> x.x0::text RETURNING n.*' % source]


FORMS = {plainly: 7, in_parallel: 3, by_cursor: 3, prepared: 3, by_view: 2,
         stored: 2}
