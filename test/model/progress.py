"""
Progress: in a quiet database, a limited number of takes returns every message
that is due and not behind another one of its key, whatever other rows there
are.
The hostile rows are those of hostile.sql.
"""

import os

HOSTILE = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                       'hostile.sql')

# Messages that a take must be able to have, as of a time.
DUE = """
    SELECT id, topic, message_key, payload FROM idem_outbox AS o
    WHERE state = 'pending' AND available_at <= '%s' AND topic <> 'hostile'
      AND (message_key IS NULL OR NOT EXISTS (
          SELECT FROM idem_outbox AS e
          WHERE e.state = 'pending' AND e.topic = o.topic
            AND e.message_key = o.message_key AND e.id < o.id))"""


def stuck(run, hostile):
    """
    Take, in a transaction that is rolled back, and return the messages that no
    take has returned.  run(text) makes a query and returns its rows.
    """
    run('BEGIN')
    if hostile:
        with open(HOSTILE) as file:
            run(file.read())
    now = run('SELECT clock_timestamp()::text')[0][0]
    due = run(DUE % now)
    # Each take has a message at least, but two that may only change something.
    for _ in range(len(due) + 2):
        if not due:
            break
        run("SELECT count(*) FROM idem_outbox_take(100, '1 hour')")
        due = run(DUE % now)
    run('ROLLBACK')
    return due
