"""What README.md shows does what it says."""

import re
from pathlib import Path

import psycopg

from pg_idempotency import Response, new_key


def test_samples(database):
    page = (Path(__file__).parent.parent / "README.md").read_text()
    samples = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(samples) >= 7
    names = {"__name__": "__main__"}
    for sample in samples:
        exec(compile(sample, "README.md", "exec"), names)
    client = names["flask_app"].test_client()
    send = dict(headers={"X-User": "ann", "Idempotency-Key": '"' + names["new_key"]() + '"'}, data=b"{}")
    assert client.post("/orders", **send).status_code == 201
    assert client.post("/orders", **send).headers["Idempotent-Replayed"] == "true"
    with names["pool"].connection() as connection:
        assert connection.execute("SELECT sku, count(*) FROM orders GROUP BY sku ORDER BY sku").fetchall() == [
            ("cup", 1), ("pan", 1), ("teapot", 1)]
    names["pool"].close()


def test_sample_of_the_front_page(idem):
    """On a database that has what the page has made before."""
    page = (Path(__file__).parents[3] / "README.md").read_text()
    sample, = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {"idem": idem, "Response": Response, "key": new_key(), "body": b'{"sku": "teapot"}'}
    answers = []
    for _ in range(2):
        exec(compile(sample, "README.md", "exec"), names)
        answers.append(names["answer"])
    first, again = answers
    assert (first.status, first.replayed, again.replayed) == (201, False, True)
    assert again.body == first.body
    with psycopg.connect("") as connection:
        assert connection.execute("SELECT count(*) FROM orders WHERE id = (%s::json ->> 'order')::int",
                                  (first.body,)).fetchone() == (1,)
