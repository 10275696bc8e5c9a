"""The examples of the documentation's pages run, and its links lead somewhere."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import DeliveryFailed, Outbox, Worker
from outbox.destinations.webhook import WebhookDestination
from tests.support import refused

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def program(page: str) -> dict[str, Any]:
    """What a page's Python leaves behind, all of it run as one program."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    exec("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)), found)
    return found


@pytest.fixture
def webhooks() -> dict[str, Any]:
    return program("webhooks.md")


@pytest.fixture
def receiver(webhooks: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The page's own receiver behind an HTTP server: its URL and what it has stored."""
    stored: dict[str, Any] = {}
    webhooks["store_once"] = stored.setdefault

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(webhooks["received"](body, {name.lower(): text for name, text in self.headers.items()}))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hooks/orders", stored
        server.shutdown()


def test_the_webhook_arrives_and_is_verified(
    webhooks: dict[str, Any], receiver: tuple[str, dict[str, Any]], engine: Engine
) -> None:
    url, stored = receiver
    webhooks.update(engine=engine, outbox=(outbox := Outbox(engine, [webhooks["orders"]])))
    for number in range(3):
        webhooks["paid"](number, "c-1")
    assert webhooks["worker"]().outbox is outbox
    destination = WebhookDestination(url, webhooks["SECRET"], allow_loopback_http=True)
    Worker(outbox, {"shop.order": destination}).run(until_idle=True)
    assert [event["number"] for event in stored.values()] == [0, 1, 2]
    assert outbox.status("order-1:paid").receipt == {"status": 204}


def test_the_spool_takes_orders(webhooks: dict[str, Any], engine: Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine, [webhooks["Order"]()])
    outbox.enqueue_many([{"number": number} for number in range(3)])
    with refused("dispatch.change_invalid"):
        outbox.enqueue({"id": "x"})
    Worker(outbox, {"shop.spool": webhooks["Spool"](tmp_path)}).run(until_idle=True)
    assert {path.name: json.loads(path.read_text())["number"] for path in tmp_path.iterdir()} == {
        f"order-{number}.json": number for number in range(3)
    }
    assert outbox.status("order-1").receipt == {"file": "order-1.json"}


def test_a_spool_that_is_away_fails_no_event(webhooks: dict[str, Any], engine: Engine, tmp_path: Path) -> None:
    outbox = Outbox(engine, [webhooks["Order"]()])
    outbox.enqueue({"number": 1})
    claim = outbox.claim("w")
    with pytest.raises(DeliveryFailed) as caught:
        webhooks["Spool"](tmp_path / "away").deliver(claim)
    assert (caught.value.outage, caught.value.retryable, caught.value.arrival) == (True, True, "unsent")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]*(?:#[^)]*)?)\)", page.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}, target
