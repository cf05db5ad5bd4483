"""What README.md shows does what it says."""

import asyncio
import re
from pathlib import Path

import psycopg
from asgi import ask
from psycopg_pool import ConnectionPool
from starlette.middleware.authentication import AuthenticationMiddleware
from test_starlette import Login

from pg_idempotency import Idempotency, Response, new_key


def test_samples(database):
    page = (Path(__file__).parent.parent / "README.md").read_text()
    samples = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(samples) >= 7
    names = {"__name__": "__main__"}
    for sample in samples:
        exec(compile(sample, "README.md", "exec"), names)
    client = names["flask_app"].test_client()

    def send():
        return client.post("/orders", headers={"Idempotency-Key": key}, data=b"{}")

    key = f'"{new_key()}"'
    assert send().status_code == 401
    with client.session_transaction() as session:
        session["user"] = "ann"
    assert send().status_code == 201
    assert send().headers["Idempotent-Replayed"] == "true"
    with client.session_transaction() as session:
        del session["user"]
    assert send().status_code == 401

    async def asynchronous():
        key = new_key()
        async with names["async_pool"]:
            missing = (await ask(names["api"], key, path="/orders")).status     # by the version of FastAPI
            assert missing in (401, 403)
            for headers, status in ((), missing), ([("authorization", "Bearer no")], 401), ([("authorization", "Bearer secret")], 201):
                answers = [await ask(names["api"], key, path="/orders", headers=headers) for _ in range(2)]
                assert [answer.status for answer in answers] == [status] * 2 and answers[1].replayed == (status == 201)
            login = AuthenticationMiddleware(names["app"], backend=Login())
            assert (await ask(names["app"], key, path="/orders")).status == 500      # without its middleware
            assert (await ask(login, key, path="/orders")).status == 403
            answers = [await ask(login, key, path="/orders", headers=[("authorization", "bob")]) for _ in range(2)]
            assert [(answer.status, answer.replayed) for answer in answers] == [(201, False), (201, True)]

    asyncio.run(asynchronous())
    with names["pool"].connection() as connection:
        assert connection.execute("SELECT sku, count(*) FROM orders GROUP BY sku ORDER BY sku").fetchall() == [
            ("bowl", 1), ("cup", 1), ("jug", 1), ("pan", 1), ("pot", 1), ("teapot", 1)]
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
