"""What README.md shows does what it says."""

import re
from pathlib import Path

import psycopg
from psycopg_pool import ConnectionPool

from pg_idempotency import Idempotency, Response, new_key


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


def test_sample_of_the_front_page(database):
    """On a database as the page has made it before."""
    page = (Path(__file__).parents[3] / "README.md").read_text()
    sample, = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    name = f"{database}_front_page"
    with psycopg.connect("", autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        try:
            with ConnectionPool(f"dbname={name}", min_size=1, max_size=2) as pool:
                with pool.connection() as connection:
                    connection.execute("CREATE SCHEMA idem")
                    connection.execute("CREATE EXTENSION idempotency SCHEMA idem")
                    connection.execute("CREATE TABLE orders (id int GENERATED ALWAYS AS IDENTITY, sku text)")
                names = {"pool": pool, "Idempotency": Idempotency, "Response": Response, "key": new_key(), "body": b"{}"}
                answers = []
                for _ in range(2):
                    exec(compile(sample, "README.md", "exec"), names)
                    answers.append((names["answer"].status, names["answer"].body, names["answer"].replayed))
                assert answers == [(201, '{"order":1}', False), (201, '{"order":1}', True)]
                with pool.connection() as connection:
                    assert connection.execute("SELECT sku FROM orders").fetchall() == [("teapot",)]
        finally:
            admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
