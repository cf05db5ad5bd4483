"""What README.md shows does what it says."""

import re
from pathlib import Path


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
