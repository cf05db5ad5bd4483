# The alert rules, by promtool's own unit tests; each has a test and a page.

import os
import re
import subprocess

import configuration
from checks import Broken, check


def promtool(*arguments):
    done = subprocess.run(['promtool', *arguments], cwd=configuration.DIRECTORY, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise Broken('promtool %s\n%s' % (' '.join(arguments), done.stdout[-3000:]))
    return done.stdout


def alerts():
    return re.findall(r'- alert: (\w+)', configuration.read('alerts.yml'))


def rules_are_valid(world):
    promtool('check', 'rules', 'alerts.yml')
    promtool('check', 'config', 'prometheus.yml')


def rules_fire_when_they_should(world):
    promtool('test', 'rules', 'alerts_test.yml')
    tests = configuration.read('alerts_test.yml')
    for alert in alerts():
        found = re.findall(r'- alertname: %s\n *eval_time: \w+\n *exp_alerts:(.*)' % alert, tests)
        check(set(found) == {'', ' []'}, '%s is tested to fire, and to be silent: %r' % (alert, found))


def a_rule_that_is_wrong_is_noticed(world):
    """The unit tests notice a threshold that is off by one."""
    rules = configuration.read('alerts.yml')
    path = world.file('alerts.yml', configuration.replace(rules, {'{state="due"} > 10000': '{state="due"} > 10001'}))
    tests = configuration.read('alerts_test.yml')
    head, _, _ = tests.partition('  # ')
    _, _, tail = tests.partition('  # IdempotencyOutboxDeep\n')
    world.file('alerts_test.yml', head + tail.partition('  # ')[0])
    done = subprocess.run(['promtool', 'test', 'rules', 'alerts_test.yml'], cwd=os.path.dirname(path),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    check(done.returncode != 0 and 'IdempotencyOutboxDeep' in done.stdout, 'promtool fails, with its name')


def each_alert_has_a_page(world):
    with open(os.path.join(configuration.DIRECTORY, '..', 'docs', 'operations.md'), encoding='utf-8') as page:
        headings = re.findall(r'^#### (\w+)\n\n\w', page.read(), re.M)
    runbooks = re.findall(r'runbook: docs/operations\.md#(\w+)', configuration.read('alerts.yml'))
    check(runbooks == [alert.lower() for alert in alerts()], 'one runbook an alert')
    check(headings == alerts(), 'the headings are the alerts')


TESTS = [
    ('the rules and the configuration of Prometheus are valid', rules_are_valid),
    ('each alert fires when it should, and not just below', rules_fire_when_they_should),
    ('a wrong threshold is noticed', a_rule_that_is_wrong_is_noticed),
    ('each alert names a page that says what to do', each_alert_has_a_page),
]
