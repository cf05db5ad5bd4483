# Both exporters, Prometheus, the dashboard and its picture.

import math
import os
import subprocess
import time
import xml.dom.minidom

import configuration
import picture
from checks import Broken, check, until
from world import DATABASE


def configurations_ask_the_same(world):
    check(configuration.query('sql_exporter.yml') == configuration.query('postgres_exporter.yml'),
          'both exporters send the same query')


def all_is_started(world):
    world.create()
    world.relay()
    world.answers('relay', word='idem_relay_database_up')
    # Each counter has counted something, some of it badly.
    world.work(1)
    world.query("SELECT idem_publish('dead', '{}')")
    world.sql_exporter()
    world.postgres_exporter()
    world.answers('sql_exporter', word='idempotency_health_status')
    world.answers('postgres_exporter', word='idempotency_health_status')
    world.prometheus()
    world.answers('prometheus', '/-/ready', 'Ready')


def wanted(world):
    """The samples to serve: name and labels."""
    figures = {(name, tuple(sorted(labels.items()))): value for name, labels, value in world.query(
        'SELECT name, labels, value FROM idem_metric_samples()')}
    for check_name, *values in world.query("""
            SELECT check_name, array_position(ARRAY['ok', 'warning', 'critical'], status) - 1, value, threshold FROM idem_health()"""):
        for name, value in zip(('status', 'value', 'threshold'), values):
            if value is not None:
                figures['idempotency_health_' + name, (('check', check_name), ('datname', DATABASE))] = value
    return figures


def served(world, job):
    found = {}
    for sample in world.ask('query', query='{__name__=~"idempotency_.*",job="%s"}' % job)['result']:
        labels = sample['metric']
        name = labels.pop('__name__')
        del labels['job'], labels['instance']
        found[name, tuple(sorted(labels.items()))] = float(sample['value'][1])
    return found


def every_figure_is_served(world):
    # Nothing happens meanwhile but what the exporters do, who only read.
    for job in ('idempotency', 'other'):
        def same():
            should, is_ = wanted(world), served(world, job)
            moving = ('age', 'lag', 'health_value', 'last_cleanup', 'records')
            return should.keys() == is_.keys() and all(
                math.isclose(is_[key], value, rel_tol=1e-9) for key, value in should.items()
                if not any(word in key[0] for word in moving))
        try:
            until(same, 'job %s serves what there is' % job, 30)
        except Broken as broken:
            should, is_ = wanted(world), served(world, job)
            differ = {key: (value, is_[key]) for key, value in should.items() if key in is_ and is_[key] != value}
            raise Broken('%s\nmissing: %s\ntoo much: %s\nother: %s' % (
                broken, sorted(should.keys() - is_.keys()), sorted(is_.keys() - should.keys()), differ)) from None
    names = {name for name, _ in wanted(world)}
    check(len(names) >= 25, 'there are some:', len(names))


def the_role_sees_figures_only(world):
    def refused(statement):
        done = subprocess.run(['psql', '-X', '-U', 'prometheus', '-d', DATABASE, '-c', 'SET search_path = idem', '-c', statement],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
        return 'permission denied' in done.stderr
    for statement in ('SELECT * FROM idem_keys', 'SELECT * FROM idem_abandoned()', 'SELECT idem_stats_reset()',
                      "SELECT idem_claim('s', 'key-of-monitoring')", 'SELECT * FROM idem_outbox'):
        check(refused(statement), 'refused:', statement)


def panels_have_something_to_show(world):
    world.work(float(os.environ.get('SECONDS_OF_LOAD', 15)))
    for title, _, queries in configuration.panels():
        for expression, _ in queries:
            result = world.ask('query', query=expression)['result']
            check(result, 'panel "%s" has something to show: %s' % (title, expression))
    # The delivered messages are seen through the relay, too.
    delivered = world.ask('query', query='sum(idem_relay_sink_delivered_total)')['result']
    check(delivered and float(delivered[0]['value'][1]) > 0, 'the relay has delivered')


def alert_of_the_real_thing(world):
    """What is done to the database reaches Prometheus' alerts."""
    def state():
        found = [alert for alert in world.ask('alerts')['alerts']
                 if alert['labels']['alertname'] == 'IdempotencyTableUnusable' and alert['labels']['table'] == 'idem_tokens']
        return bool(found)
    check(not state(), 'no alert before')
    world.query('ALTER TABLE idem_tokens ENABLE ROW LEVEL SECURITY')
    try:
        until(state, 'an alert about the table', 90)
    finally:
        world.query('ALTER TABLE idem_tokens DISABLE ROW LEVEL SECURITY')


def draw(world, path, seconds, event=None):
    """The dashboard of the last seconds."""
    now = time.time()
    picture.draw(lambda expression: world.ask('query_range', query=expression, start=now - seconds, end=now,
                                              step=max(1, seconds / 60))['result'], path, now - seconds, seconds, event)
    document = xml.dom.minidom.parse(path)
    text = ' '.join(node.firstChild.data for tag in ('text', 'tspan', 'title') for node in document.getElementsByTagName(tag)
                    if node.firstChild is not None and node.firstChild.nodeType == node.TEXT_NODE)
    for title, _, _ in configuration.panels():
        check(title in text, 'the picture has "%s"' % title)
    curves = [node for node in document.getElementsByTagName('path') if node.getAttribute('d').count('L') > 5]
    check(len(curves) >= len(list(configuration.panels())), 'and curves:', len(curves))


def the_picture_is_drawn(world):
    path = os.environ.get('PICTURE') or os.path.join(world.directory, 'monitoring.svg')
    draw(world, path, float(os.environ.get('SECONDS_OF_LOAD', 15)) + 5)


def the_picture_of_trouble_is_drawn(world):
    """The relay stops, and workers die.  The thresholds are lowered, so that this takes minutes."""
    if not os.environ.get('PICTURE'):
        return
    seconds = float(os.environ.get('SECONDS_OF_LOAD', 15))
    for name, value in (('outbox_oldest', '10s'), ('stuck_leases', '5')):
        world.query("ALTER DATABASE %s SET idempotency.health_%s = '%s'" % (DATABASE, name, value))
    stopped = time.time()
    world.stop('relay')
    world.work(seconds, dying=True)
    draw(world, os.environ['PICTURE'].replace('.svg', '-alerts.svg'), seconds * 1.5, ('the relay stops', stopped))
    found = {alert['labels']['alertname'] for alert in world.ask('alerts')['alerts']}
    check('IdempotencyRelayDown' in found, 'an alert about the relay:', found)


TESTS = [
    ('both exporters ask the same', configurations_ask_the_same),
    ('exporters, relay and Prometheus start', all_is_started),
    ('each exporter serves every figure of idem_metric_samples() and idem_health()', every_figure_is_served),
    ('the role that watches sees nothing else', the_role_sees_figures_only),
    ('each query of the dashboard has an answer', panels_have_something_to_show),
    ('the picture is drawn from the same queries', the_picture_is_drawn),
    ('the picture of trouble, too', the_picture_of_trouble_is_drawn),
    ('a table that is altered is an alert in Prometheus', alert_of_the_real_thing),
]
