"""Everything a delivery takes, over loopback HTTP, beside the ``httpx.Client.post`` that one would write by hand."""

from __future__ import annotations

import time

from benchmarks.bare import post_all
from benchmarks.children import SIGNER, cms
from benchmarks.databases import Databases, outbox
from benchmarks.events import TOPIC, payload
from benchmarks.harness import Bench, Scenario, at_least
from benchmarks.server import service
from outbox import Outbox, Worker


def _by_worker(box: Outbox, origin: str, concurrency: int, count: int) -> float:
    with cms(origin) as destination:
        worker = Worker(box, {TOPIC: destination}, concurrency=concurrency)
        began = time.perf_counter()
        done = worker.run(until_idle=True).succeeded
        assert done == count, f"{done} delivered of {count}"
        return done / (time.perf_counter() - began)


def _headers(body: bytes) -> dict[str, str]:
    algorithm, key_id, signature = SIGNER.sign(body)
    return {
        "Content-Type": "application/json; charset=utf-8",
        "Accept": "application/json",
        "X-Localization-Signature-Algorithm": algorithm,
        "X-Localization-Key-Id": key_id,
        "X-Localization-Signature": signature,
    }


def _top_up(databases: Databases, url: str, box: Outbox, count: int) -> None:
    """As many due as one drain delivers; the other contender leaves them."""
    if not box.ready():
        databases.load(url, count)
        databases.settle_in(url)


def _http(bench: Bench, databases: Databases) -> None:
    count = bench.size(6_000, 1_500)
    bodies = [payload(number).encode() for number in range(1, count + 1)]
    headers = _headers(bodies[0])
    with databases.fresh() as url, service() as origin:
        box = outbox(url)
        target = f"{origin}/v2/localization/changes"
        post_all(target, bodies[:50], headers, 4)
        for concurrency in (4, 16):

            def ours(concurrency: int = concurrency) -> float:
                return _by_worker(box, origin, concurrency, count)

            def theirs(concurrency: int = concurrency) -> float:
                return post_all(target, bodies, headers, concurrency)

            found = bench.alternate(
                {"ours": ours, "httpx": theirs}, prepare=lambda: _top_up(databases, url, box, count)
            )
            bench.ratio(
                f"worker drain over HTTP, {concurrency} at once / httpx.Client.post alone", found["ours"],
                found["httpx"], unit="events/s", names=("ours", "httpx"), budget=at_least(1.2),
                cpu=(found.cpu["ours"], found.cpu["httpx"]),
            )  # fmt: skip
        box.engine.dispose()


HTTP = Scenario("http", "a worker over loopback HTTP beside bare httpx.Client.post threads", _http)
