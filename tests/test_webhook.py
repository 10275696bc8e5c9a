"""Webhooks by the Standard Webhooks specification, with its own reference library as the receiver."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from standardwebhooks import Webhook, WebhookVerificationError

from outbox import DeliveryFailed, InputError, Outbox, Worker
from outbox.contracts.webhook import WebhookContract
from outbox.destinations.webhook import WebhookDestination
from outbox.http import Address, SystemResolver
from tests.misbehaving import Answer, Server, hang_up, raw, reply, silence, unanswered_port
from tests.support import refused

KEY = b"k" * 32
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OLD = "whsec_" + base64.b64encode(b"o" * 24).decode()
ORDER = {"id": "order-1:paid", "customer": "Zoë", "total": 12.5, "lines": [{"sku": "a", "n": 2}]}
TOPIC = "shop.order"


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine, [WebhookContract(TOPIC)])


def to(server: Server, secrets: Any = SECRET, **more: Any) -> WebhookDestination:
    url = f"http://127.0.0.1:{server.port}/hooks/in?tenant=7"
    return WebhookDestination(url, secrets, allow_loopback_http=True, **more)


def delivered(outbox: Outbox, destination: WebhookDestination) -> Any:
    """What the destination makes of one event."""
    outbox.enqueue(ORDER)
    claim = outbox.claim("w")
    assert claim is not None
    return destination.deliver(claim)


def failure(outbox: Outbox, *script: Answer, **more: Any) -> DeliveryFailed:
    with Server(*script) as server, to(server, **more) as destination, pytest.raises(DeliveryFailed) as caught:
        delivered(outbox, destination)
    return caught.value


def received(server: Server, number: int = 0) -> tuple[bytes, dict[str, str]]:
    request = server.requests[number]
    return request.body, {name.decode().lower(): value.decode() for name, value in request.headers}


# -- what the receiver sees ------------------------------------------------------------------------------------------


def test_the_reference_library_verifies_it(outbox: Outbox) -> None:
    with Server(reply(204, content_type=None)) as server, to(server) as destination:
        assert delivered(outbox, destination) == {"status": 204}
    body, headers = received(server)
    assert Webhook(SECRET).verify(body, headers) == ORDER
    assert headers["webhook-id"] == ORDER["id"]
    assert headers["content-type"] == "application/json"
    assert server.requests[0].line.split()[:2] == [b"POST", b"/hooks/in?tenant=7"]
    assert body == outbox.claim_batch("w", now=1e12)[0].payload.encode()
    with pytest.raises(WebhookVerificationError):
        Webhook(OLD).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body + b" ", headers)


def test_while_a_secret_is_replaced_both_verify(outbox: Outbox) -> None:
    with Server(reply()) as server, to(server, [SECRET, OLD]) as destination:
        delivered(outbox, destination)
    body, headers = received(server)
    for secret in (SECRET, OLD):
        assert Webhook(secret).verify(body, headers) == ORDER


def test_a_replay_keeps_its_id(outbox: Outbox) -> None:
    outbox.enqueue(ORDER)
    with Server(hang_up, reply(500), reply()) as server, to(server) as destination:
        for _ in range(3):
            outbox.run_once(destination, "w", now=None if not server.requests else 1e12 * len(server.requests))
    assert [received(server, number)[1]["webhook-id"] for number in range(3)] == [ORDER["id"]] * 3


def test_the_hosts_own_headers_go_along(outbox: Outbox) -> None:
    with Server(reply()) as server, to(server, headers=lambda: {"Authorization": "Bearer t"}) as destination:
        delivered(outbox, destination)
    assert received(server)[1]["authorization"] == "Bearer t"


@pytest.mark.parametrize(
    "headers",
    [{"webhook-id": "x"}, {"Webhook-Signature": "x"}, {"Host": "x"}, {"traceparent": "x"}, {"A": "b\r\nc"}, 7],
)
def test_headers_that_are_not_the_hosts_to_give(outbox: Outbox, headers: Any) -> None:
    with Server(reply()) as server, to(server, headers=lambda: headers) as destination:
        with pytest.raises(DeliveryFailed) as caught:
            delivered(outbox, destination)
        assert not server.requests
    assert (caught.value.code, caught.value.retryable, caught.value.arrival) == ("authentication", False, "unsent")


# -- what the receiver answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_every_2xx_is_accepted(outbox: Outbox, status: int) -> None:
    with Server(reply(status)) as server, to(server) as destination:
        outbox.enqueue(ORDER)
        outbox.run_once(destination, "w")
    assert outbox.status(str(ORDER["id"])).receipt == {"status": status}


def test_a_body_that_is_too_large_is_not_read_and_accepted_all_the_same(outbox: Outbox) -> None:
    with Server(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 100_000)) as server:
        assert delivered(outbox, to(server)) == {"status": 200}


@pytest.mark.parametrize(
    ("status", "code", "outage"),
    [
        (301, "redirect", False), (307, "redirect", False), (400, "http_status", False), (401, "http_status", False),
        (404, "http_status", False), (408, "http_status", False), (422, "http_status", False),
        (429, "http_status", True), (500, "http_status", True), (502, "http_status", True), (503, "http_status", True),
    ],
)  # fmt: skip
def test_all_but_2xx_and_410_is_tried_again(outbox: Outbox, status: int, code: str, outage: bool) -> None:
    error = failure(outbox, reply(status, None, ("Retry-After", "7"), ("Location", "http://127.0.0.1:1/")))
    assert (error.code, error.retryable, error.http_status, error.arrival) == (code, True, status, "refused")
    assert (error.outage, error.gone, error.retry_after) == (outage, False, 7.0)


def test_a_receiver_that_is_gone_fails_the_event_and_pauses_the_topic(outbox: Outbox) -> None:
    outbox.enqueue(ORDER)
    outbox.enqueue_many([{"id": f"order-{number}"} for number in range(2, 7)])
    with Server(reply(410)) as server, to(server) as destination:
        Worker(outbox, {TOPIC: destination}, concurrency=1).run(until_idle=True)
    assert len(server.requests) <= 2  # the second may have been on its way when the answer to the first came
    assert outbox.status(str(ORDER["id"])).last_error_code == "gone"
    assert outbox.gate(TOPIC).state == "paused"
    assert [outbox.status(f"order-{number}").status for number in range(3, 7)] == ["pending"] * 4


@pytest.mark.parametrize(("script", "timeout"), [(silence, 0.2), (hang_up, 5.0)])
def test_no_answer(outbox: Outbox, script: Answer, timeout: float) -> None:
    error = failure(outbox, script, timeout=timeout)
    assert (error.code, error.retryable, error.outage, error.arrival) == ("network", True, True, "unknown")


def test_nobody_listens(outbox: Outbox) -> None:
    with unanswered_port() as port, pytest.raises(DeliveryFailed) as caught:
        delivered(outbox, WebhookDestination(f"http://127.0.0.1:{port}", SECRET, timeout=0.2, allow_loopback_http=True))
    assert (caught.value.code, caught.value.outage, caught.value.arrival) == ("network.unsent", True, "unsent")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), status=st.integers(100, 999))
def test_whatever_comes_back_is_an_answer_or_a_declared_failure(
    sqlite_engine: Engine, data: bytes, status: int
) -> None:
    outbox = Outbox(sqlite_engine, [WebhookContract(TOPIC)])
    outbox.enqueue(ORDER, now=0.0)
    claim = outbox.claim_batch("w", lease_seconds=1e-6)[:1] or outbox.claim_batch("w", now=1e12)
    if not claim:
        return
    head = b"HTTP/1.1 %d Something\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
    for sent in (data, head + data):
        with Server(raw(sent, close=True)) as server, to(server, timeout=5.0) as destination:
            try:
                assert destination.deliver(claim[0])["status"] in range(200, 300)
            except DeliveryFailed as error:
                assert error.code in {"network", "network.unsent", "http_status", "redirect", "gone"}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "", None, 7, "example.com", "http://example.com/", "ftp://example.com/", "https://", "https:///path",
        "https://user:hunter2@example.com/", "https://example.com/#hunter2", "https://example.com/a b",
        "https://example.com/\r\nX: y", "https://exämple.com/", "https://example.com/é", "https://example.com:0/",
        "https://example.com:99999/", "https://[::1/", "https://127.1/", "https://0x7f000001/", "https://2130706433/",
        "https://example.com/" + "x" * 2048, "//example.com/", "https://example.com\\@127.0.0.1/",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: Any) -> None:
    with refused("destination.url_invalid") as caught:
        WebhookDestination(url, SECRET)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[fd00::1]", "[::ffff:127.0.0.1]", "[64:ff9b::a00:1]"]
)
def test_forbidden_addresses_are_refused_at_once(host: str) -> None:
    with refused("destination.address_forbidden"):
        WebhookDestination(f"https://{host}/", SECRET)
    WebhookDestination(f"https://{host}/", SECRET, allow_private=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254"])
def test_a_name_that_leads_to_a_forbidden_address_is_sent_nothing(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def lookup(_self: object, host: str, port: int, seconds: float) -> Sequence[Address]:
        return [Address(2, (address, port))]

    monkeypatch.setattr(SystemResolver, "__call__", lookup)
    with pytest.raises(DeliveryFailed) as caught:
        delivered(outbox, WebhookDestination("https://customer.example", SECRET, allow_loopback_http=True))
    error = caught.value
    assert (error.code, error.retryable, error.arrival) == ("destination.address_forbidden", True, "unsent")


@pytest.mark.parametrize(
    "secret",
    [
        "", None, 7, b"whsec_", [], "whsec_", "whsec_hunter2", SECRET.removeprefix("whsec_"), SECRET + "é",
        "whsec_" + base64.b64encode(b"x" * 23).decode(), "whsec_" + base64.b64encode(b"x" * 65).decode(),
        SECRET + "\n", [SECRET, "hunter2"], {"a": SECRET},
    ],
)  # fmt: skip
def test_secrets_that_are_refused(secret: Any) -> None:
    with refused("destination.secret_invalid") as caught:
        WebhookDestination("https://example.com/", secret)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"headers": {}}, "destination.headers_invalid"),
        ({"timeout": 0}, "destination.timeout_invalid"),
        ({"timeout": True}, "destination.timeout_invalid"),
    ],
)
def test_other_arguments_that_are_refused(arguments: dict[str, Any], code: str) -> None:
    with refused(code):
        WebhookDestination("https://example.com/", SECRET, **arguments)


def test_neither_url_nor_secret_is_ever_shown(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Server(reply(500)) as server:
        url = f"http://127.0.0.1:{server.port}/hunter2?key=hunter2"
        destination = WebhookDestination(url, SECRET, allow_loopback_http=True)
        outbox.enqueue(ORDER)
        Worker(outbox, {TOPIC: destination}, concurrency=1).run(until_idle=True)
    shown = repr(destination) + caplog.text + repr(outbox.status(str(ORDER["id"])))
    assert "hunter2" not in shown
    assert SECRET not in shown


# -- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [None, [], "text", {}, {"id": None}, {"id": 7}, {"id": ""}, {"id": "a b"}, {"id": "x" * 257}, {"name": "x"}],
)
def test_events_without_an_id_are_refused(outbox: Outbox, event: Any) -> None:
    with refused("dispatch.change_invalid"):
        outbox.enqueue(event)
    assert outbox.health().counts["pending"] == 0


def test_ids_and_keys_by_other_names(engine: Engine) -> None:
    def key(event: Mapping[str, Any]) -> str:
        return f"customer-{event['customer']}"

    outbox = Outbox(engine, [
        WebhookContract("named", event_id="uuid", ordering_key="customer"),
        WebhookContract("made", event_id=lambda event: f"{event['kind']}:{event['n']}", ordering_key=key),
    ])  # fmt: skip
    assert outbox.enqueue({"uuid": "u-1", "customer": "c"}, topic="named").ordering_key == "c"
    assert outbox.enqueue({"uuid": "u-2", "customer": None}, topic="named").ordering_key is None
    assert outbox.enqueue({"uuid": "u-3"}, topic="named").ordering_key is None
    made = outbox.enqueue({"kind": "paid", "n": 1, "customer": 7}, topic="made")
    assert (made.event_id, made.ordering_key) == ("paid:1", "customer-7")
    with refused("dispatch.ordering_key_invalid"):
        outbox.enqueue({"uuid": "u-4", "customer": 7}, topic="named")
    with refused("dispatch.change_invalid"):
        outbox.enqueue({"kind": "paid"}, topic="made")


@pytest.mark.parametrize(
    "arguments",
    [{"topic": ""}, {"topic": "a b"}, {"event_id": ""}, {"event_id": None}, {"ordering_key": 7}, {"ordering_key": ""},
     {"hold_on_failure": 1}],
)  # fmt: skip
def test_contracts_that_are_refused(arguments: dict[str, Any]) -> None:
    with refused("dispatch.contract_invalid"):
        WebhookContract(**{"topic": TOPIC, **arguments})


@pytest.mark.parametrize(
    "answer", [None, {}, {"status": 199}, {"status": 300}, {"status": True}, {"status": "200"}, []]
)
def test_answers_that_are_none(answer: Any) -> None:
    with pytest.raises(InputError):
        WebhookContract(TOPIC).accept("event-1", answer)


def test_several_topics_in_one_worker(engine: Engine) -> None:
    topics = [f"customer.{number}" for number in range(3)]
    outbox = Outbox(engine, [WebhookContract(topic) for topic in topics])
    for topic in topics:
        outbox.enqueue_many([{"id": f"{topic}:{number}"} for number in range(10)], topic=topic)
    with Server(reply()) as one, Server(reply(503)) as two, Server(reply()) as three:
        destinations = dict(zip(topics, map(to, (one, two, three)), strict=True))
        Worker(outbox, destinations, concurrency={topics[0]: 1}).run(until_idle=True)
    assert (len(one.requests), len(three.requests)) == (10, 10)
    assert outbox.health().topics[topics[1]].state in ("open", "held")
    assert outbox.health().failed == 0
