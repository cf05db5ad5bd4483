# The queries in the configurations of the exporters, without a parser for YAML,
# which is in no other package that the project needs.

import json
import os

DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'monitoring')


def read(name):
    with open(os.path.join(DIRECTORY, name), encoding='utf-8') as file:
        return file.read()


def query(name='sql_exporter.yml'):
    """The text under "query: |", without its indentation."""
    lines = iter(read(name).split('\n'))
    for line in lines:
        if line.strip() in ('query: |', '- query: |'):
            break
    taken = []
    indent = None
    for line in lines:
        width = len(line) - len(line.lstrip())
        if indent is None:
            indent = width
        if line.strip() and width < indent:
            break
        taken.append(line[indent:])
    return '\n'.join(taken).rstrip()


def replace(text, words):
    """What a user fills in, and nothing else; each must be there."""
    for old, new in words.items():
        if old not in text:
            raise ValueError('the configuration has no %r' % old)
        text = text.replace(old, new)
    return text


def panels():
    """Title, unit and queries of each panel of the dashboard: the expression, and
    the name of its curves."""
    for panel in json.loads(read('dashboard.json'))['panels']:
        yield panel['title'], panel['fieldConfig']['defaults']['unit'], [
            (target['expr'].replace('$job', 'idempotency').replace('$datname', '.*').replace('$__rate_interval', '10s'), target['legendFormat'])
            for target in panel['targets']]
