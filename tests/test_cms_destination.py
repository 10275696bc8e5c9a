"""The CMS destination end to end: what goes over the wire, what comes of each kind of answer, what stays secret."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import hmac
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from typing import Any

import pytest

from outbox import Claim, DeliveryFailed, Destination, InputError, OutboxError
from outbox.contracts.cms import CMS_CHANGE, MAX_RESPONSE_BYTES
from outbox.destinations.cms import CMSDestination, HMACSigner, Signer
from outbox.errors import CODES
from outbox.http import TransportFailed
from tests.cms_events import event
from tests.misbehaving import (
    EVENT_ID,
    Answer,
    Exchange,
    Server,
    accepted,
    blocked,
    canonical,
    chunked,
    connections,
    echo,
    flood,
    hang_up,
    message,
    raw,
    refused_port,
    reply,
    reset,
    silence,
    trickle,
    unanswered_port,
)

KEY_ID = "host-key:1"
KEY = b"a key nobody must see"
SHORT = 0.4
BOUND = 10.0
PATIENCE = 20.0
ORIGIN = "https://cms.example.com"


def signer() -> HMACSigner:
    return HMACSigner(KEY_ID, KEY)


def claim(**changes: Any) -> Claim:
    encoded = CMS_CHANGE.encode(event(**changes))
    return Claim(
        topic="cms.change",
        event_id=encoded.event_id,
        payload=encoded.payload,
        payload_sha256=encoded.payload_sha256,
        attempt=1,
        max_attempts=5,
        lease_owner="worker",
        lease_token="token",
        lease_expires_at=2e9,
        id=1,
    )


@contextlib.contextmanager
def serving(*script: Answer, **options: Any) -> Iterator[tuple[Server, CMSDestination]]:
    options.setdefault("timeout", PATIENCE)
    chosen = options.pop("signer", None) or signer()
    with (
        Server(*script) as server,
        CMSDestination(server.origin, chosen, allow_loopback_http=True, **options) as destination,
    ):
        yield server, destination


def failure(destination: CMSDestination, sent: Claim | None = None) -> DeliveryFailed:
    started = time.monotonic()
    with pytest.raises(DeliveryFailed) as caught:
        destination.deliver(sent or claim())
    assert time.monotonic() - started < BOUND
    return caught.value


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and everything a traceback, a debugger or an error reporter could reach from it."""
    seen: list[BaseException | None] = [error]
    for found in seen:
        if found is not None:
            yield found
            seen.extend(other for other in (found.__cause__, found.__context__) if other not in seen)


def said(error: BaseException) -> str:
    return "\n".join(f"{link!r} {link} {vars(link)}" for link in chain(error))


# -- the request ------------------------------------------------------------------------------------------------------


def test_the_request_on_the_wire() -> None:
    sent = claim(source_text="Preise ohne MwSt.: 480 €\n\U0001f600")
    with serving(echo, headers=lambda: {"Authorization": "Bearer abc", "X-Tenant": "site 1"}) as (server, destination):
        assert destination.deliver(sent) == accepted(sent.event_id)
    (request,) = server.requests
    assert request.line == b"POST /v2/localization/changes HTTP/1.1"
    assert request.body == sent.payload.encode("utf-8")
    signature = hmac.new(KEY, request.body, hashlib.sha256).hexdigest()
    assert {name.decode(): value.decode() for name, value in request.headers} == {
        "Host": f"127.0.0.1:{server.port}",
        "Content-Type": "application/json; charset=utf-8",
        "Content-Length": str(len(request.body)),
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "X-Localization-Signature-Algorithm": "hmac-sha256",
        "X-Localization-Key-Id": KEY_ID,
        "X-Localization-Signature": signature,
        "Authorization": "Bearer abc",
        "X-Tenant": "site 1",
    }
    assert len(request.headers) == 10


def test_the_longest_event_is_delivered() -> None:
    sent = claim(source_text="\u0001" * 660_000)
    assert len(sent.payload) > 3_900_000
    with serving(echo) as (server, destination):
        destination.deliver(sent)
        assert server.requests[0].body == sent.payload.encode()


def test_connections_are_kept() -> None:
    with serving(echo) as (server, destination):
        for number in range(5):
            sent = claim(event_id=f"event-{number}")
            assert destination.deliver(sent)["event_id"] == sent.event_id
        assert (server.connections, len(server.requests)) == (1, 5)


def test_many_threads_get_each_its_own_answer() -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(10):
            sent = claim(event_id=f"event-{number}-{turn}")
            if destination.deliver(sent)["event_id"] != sent.event_id:
                wrong.append(sent.event_id)

    with serving(echo) as (server, destination):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(server.requests) == 80
        assert server.connections <= 8
    assert wrong == []


def test_close_can_be_followed_by_more() -> None:
    with serving(echo) as (server, destination):
        destination.deliver(claim())
        destination.close()
        destination.close()
        destination.deliver(claim())
        assert server.connections == 2


def test_localhost_by_name() -> None:
    with Server(echo) as server, CMSDestination(
        f"http://localhost:{server.port}", signer(), allow_loopback_http=True
    ) as destination:  # fmt: skip
        assert destination.deliver(claim()) == accepted()
        assert server.requests[0].values("Host") == [f"localhost:{server.port}"]


def test_localhost_is_loopback_whatever_the_hosts_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = [(2, 1, 6, "", ("192.0.2.1", 80))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: elsewhere)
    error = failure(CMSDestination("http://localhost", signer(), allow_loopback_http=True))
    assert (error.code, error.retryable) == ("network.unsent", True)
    assert isinstance(error.__cause__, TransportFailed)
    assert error.__cause__.kind == "AddressForbidden"


# -- answers ----------------------------------------------------------------------------------------------------------

GOOD = canonical(accepted())


@pytest.mark.parametrize("status", [200, 202])
@pytest.mark.parametrize("state", ["enqueued", "superseded", "cancelled"])
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
def test_accepted(status: int, state: str, content_type: str) -> None:
    with serving(reply(status, accepted(status=state), content_type=content_type)) as (_, destination):
        response = destination.deliver(claim())
    assert response == accepted(status=state)
    kept = {"job_count": 3, "plan_id": "plan-1", "status": state}
    assert CMS_CHANGE.receipt(EVENT_ID, response).text == canonical(kept).decode()


def whole(body: bytes, *headers: tuple[str, str], content_type: str | None = "application/json") -> Answer:
    return raw(message(200, body, *headers, content_type=content_type))


WRONG_ANSWERS: dict[str, tuple[Answer, str]] = {
    "no type": (whole(GOOD, content_type=None), "response_content_type"),
    "HTML": (whole(GOOD, content_type="text/html"), "response_content_type"),
    "another charset": (whole(GOOD, content_type="application/json; charset=latin-1"), "response_content_type"),
    "two types": (whole(GOOD, ("Content-Type", "text/html")), "response_content_type"),
    "compressed": (whole(gzip.compress(GOOD), ("Content-Encoding", "gzip")), "response_content_type"),
    "declared too long": (raw(message(200, b"", length=MAX_RESPONSE_BYTES + 1)), "response_size"),
    "chunked too long": (raw(chunked(b"x" * MAX_RESPONSE_BYTES, b"x")), "response_size"),
    "endless": (
        flood(b"1000\r\n" + b"x" * 4096 + b"\r\n", at_once=chunked()[: -len(b"0\r\n\r\n")]),
        "response_size",
    ),
    "nothing": (whole(b""), "response_json"),
    "not UTF-8": (whole(GOOD[:-1] + b"\xff"), "response_json"),
    "BOM": (whole(b"\xef\xbb\xbf" + GOOD), "response_json"),
    "duplicate keys": (whole(GOOD.replace(b'"status"', b'"status":"enqueued","status"')), "response_json"),
    "not canonical": (whole(json.dumps(accepted()).encode()), "response_json"),
    "a newline behind": (whole(GOOD + b"\n"), "response_json"),
    "cut by its length": (raw(message(200, GOOD, length=len(GOOD) - 1)), "response_json"),
    "too deep": (whole(b"[" * 100_000), "response_json"),
    "another event's": (whole(canonical(accepted("event-2"))), "response_binding"),
    "an array": (whole(b"[]"), "response_binding"),
    "a field more": (whole(canonical(accepted(extra=1))), "response_binding"),
    "an error object": (whole(canonical(blocked("x"))), "response_binding"),
    "a bool for a number": (whole(canonical(accepted(job_count=True))), "response_binding"),
    "no jobs": (whole(canonical(accepted(job_count=0, inserted_jobs=0))), "response_binding"),
    "more jobs than there are": (whole(canonical(accepted(inserted_jobs=4))), "response_binding"),
}


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_wrong_answers_are_retried(what: str) -> None:
    answer, code = WRONG_ANSWERS[what]
    with serving(answer) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == (code, True)
        assert len(server.requests) == 1


def test_an_answer_of_exactly_the_limit_is_read() -> None:
    text = b'{"x":"' + b"x" * (MAX_RESPONSE_BYTES - 8) + b'"}'
    assert len(text) == MAX_RESPONSE_BYTES
    with serving(raw(chunked(text))) as (_, destination):
        assert failure(destination).code == "response_binding"


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
def test_redirects_are_final_and_not_followed(status: int) -> None:
    with Server(echo) as elsewhere:
        location = ("Location", f"{elsewhere.origin}/v2/localization/changes")
        with serving(reply(status, blocked("moved"), location, ("Retry-After", "5"))) as (_, destination):
            error = failure(destination)
        assert (error.code, error.retryable, error.retry_after) == ("redirect", False, None)
        assert elsewhere.connections == 0


STATUSES = [
    201,
    204,
    206,
    400,
    401,
    403,
    404,
    408,
    409,
    410,
    413,
    415,
    422,
    425,
    426,
    429,
    499,
    500,
    501,
    502,
    503,
    504,
    599,
]
RETRIED = {408, 425, 429}


@pytest.mark.parametrize("status", [status for status in STATUSES if status != 204])
def test_the_servers_code_is_kept(status: int) -> None:
    with serving(reply(status, blocked("plan.busy"), ("Retry-After", "7"))) as (_, destination):
        error = failure(destination)
    retried = status in RETRIED or status >= 500
    assert (error.code, error.retryable) == ("plan.busy", retried)
    assert error.retry_after == (7.0 if retried else None)


@pytest.mark.parametrize("status", STATUSES)
def test_without_a_code_only_the_status_counts(status: int) -> None:
    body = b"" if status == 204 else b"<html>"
    with serving(raw(message(status, body, ("Retry-After", "7"), content_type="text/html"))) as (_, destination):
        error = failure(destination)
    retried = status in RETRIED or status >= 500
    assert (error.code, error.retryable) == ("http_status", retried)
    assert error.retry_after == (7.0 if retried else None)


def test_an_endless_error_page_is_still_an_error() -> None:
    head = b"HTTP/1.1 404 Gone\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(flood(b"1000\r\n" + b"x" * 4096 + b"\r\n", at_once=head)) as (_, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("http_status", False)


def test_a_date_to_retry_after() -> None:
    def busy(exchange: Exchange) -> None:
        date = formatdate(time.time() + 1000, usegmt=True)
        exchange.send(message(503, canonical(blocked("busy")), ("Retry-After", date)))

    with serving(busy) as (_, destination):
        waiting = failure(destination).retry_after
    assert waiting is not None
    assert 900 < waiting <= 1000


def test_a_senseless_retry_after_is_ignored() -> None:
    with serving(reply(503, blocked("busy"), ("Retry-After", "soon"))) as (_, destination):
        error = failure(destination)
    assert (error.code, error.retryable, error.retry_after) == ("busy", True, None)


# -- no answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        hang_up,
        reset,
        raw(message(200, GOOD, length=len(GOOD) + 1), close=True),
        raw(b"HTTP/1.1 200 OK\r\nBad Header: x\r\n\r\n"),
        flood(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    ],
    ids=["hang-up", "reset", "shorter than declared", "no HTTP", "1xx flood"],
)
def test_no_answer(answer: Answer) -> None:
    with serving(answer) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("network", True)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        silence,
        trickle(message(200, GOOD)),
        trickle(GOOD, at_once=message(200, b"", length=len(GOOD))),
        flood(b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.02),
        raw(message(200, GOOD, length=len(GOOD) + 1)),
    ],
    ids=["silence", "trickled head", "trickled body", "trickled 1xx", "longer than sent"],
)
def test_the_timeout_is_total(answer: Answer) -> None:
    with serving(answer, timeout=SHORT) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("network", True)
        assert len(server.requests) == 1


def test_a_trickled_answer_in_time_is_accepted() -> None:
    text = message(200, GOOD)
    with serving(trickle(text[-20:], at_once=text[:-20])) as (_, destination):
        assert destination.deliver(claim()) == accepted()


def test_refused() -> None:
    with refused_port() as port:
        error = failure(CMSDestination(f"http://127.0.0.1:{port}", signer(), allow_loopback_http=True))
        assert (error.code, error.retryable) == ("network.unsent", True)


def test_connecting_for_ever() -> None:
    with unanswered_port() as port:
        options: dict[str, Any] = {"timeout": SHORT, "allow_loopback_http": True}
        error = failure(CMSDestination(f"http://127.0.0.1:{port}", signer(), **options))
        assert (error.code, error.retryable) == ("network.unsent", True)


def test_tls_to_a_server_that_has_none() -> None:
    with connections(lambda sock, _: sock.sendall(b"HTTP/1.1 400 Plain HTTP\r\n\r\n")) as port:
        error = failure(CMSDestination(f"https://127.0.0.1:{port}", signer()))
        assert (error.code, error.retryable) == ("network.unsent", True)


def test_a_slow_signer_uses_up_the_time() -> None:
    class Slow:
        def sign(self, body: bytes) -> tuple[str, str, str]:
            time.sleep(0.2)
            return signer().sign(body)

    with serving(echo, signer=Slow(), timeout=0.1) as (server, destination):
        assert failure(destination).code == "network.unsent"
        assert server.connections == 0


# -- signing ----------------------------------------------------------------------------------------------------------


def test_hmac_signer() -> None:
    # RFC 4231, test case 2.
    signed = HMACSigner("k", b"Jefe").sign(b"what do ya want for nothing?")
    assert signed == ("hmac-sha256", "k", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843")
    assert isinstance(HMACSigner("k", b"x"), Signer)


@pytest.mark.parametrize(
    ("key_id", "key"),
    [
        ("", b"x"), ("a b", b"x"), ("x" * 257, b"x"), ("k\r\nX: y", b"x"), (None, b"x"), (b"k", b"x"), (1, b"x"),
        ("k", b""), ("k", "text"), ("k", None), ("k", 1), ("k", [1]),
    ],
)  # fmt: skip
def test_bad_keys(key_id: Any, key: Any) -> None:
    with pytest.raises(InputError) as caught:
        HMACSigner(key_id, key)
    assert caught.value.code == "destination.key_invalid"
    assert "text" not in str(caught.value)


class Says:
    """A signer that answers what it is told to."""

    def __init__(self, *answer: Any) -> None:
        self._answer = answer[0] if len(answer) == 1 else answer

    def sign(self, body: bytes) -> Any:
        return self._answer


@pytest.mark.parametrize("signature", ["A", "a" * 4096, "aA0_.:/+=-"])
def test_signatures_of_other_kinds(signature: str) -> None:
    with serving(echo, signer=Says("ed25519", "k", signature)) as (server, destination):
        destination.deliver(claim())
        (request,) = server.requests
    assert request.values("X-Localization-Signature-Algorithm") == ["ed25519"]
    assert request.values("X-Localization-Key-Id") == ["k"]
    assert request.values("X-Localization-Signature") == [signature]


@pytest.mark.parametrize(
    "bad",
    [
        Says(None),
        Says("abc"),
        Says("a", "k"),
        Says("a", "k", "s", "t"),
        Says("", "k", "s"),
        Says("a b", "k", "s"),
        Says("a\r\nX-Evil: 1", "k", "s"),
        Says("a", "", "s"),
        Says("a", "k\n", "s"),
        Says("a", "é", "s"),
        Says("a", "x" * 257, "s"),
        Says("a", "k", ""),
        Says("a", "k", "s" * 4097),
        Says("a", "k", "s\n"),
        Says("a", "k", "s s"),
        Says("a", "k", "s~"),
        Says("a", "k", b"s"),
        Says("a", "k", None),
        Says(1, 2, 3),
    ],
    ids=lambda signer: f"{signer._answer!s:.30}",
)
def test_bad_signatures_send_nothing(bad: Says) -> None:
    with serving(echo, signer=bad) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("signing", False)
        assert server.connections == 0


def test_what_a_signer_raises_stays_inside() -> None:
    class Leaky:
        def sign(self, body: bytes) -> tuple[str, str, str]:
            raise ValueError(KEY, body)

    with serving(echo, signer=Leaky()) as (server, destination):
        error = failure(destination, claim(source_text="Confidential"))
        assert (error.code, error.retryable) == ("signing", False)
        assert list(chain(error)) == [error]
        assert server.connections == 0


# -- authentication ---------------------------------------------------------------------------------------------------


def test_headers_are_asked_for_anew_each_time() -> None:
    tokens = iter(["one", "two"])
    with serving(echo, headers=lambda: {"Authorization": next(tokens)}) as (server, destination):
        destination.deliver(claim())
        destination.deliver(claim())
        assert [request.values("Authorization") for request in server.requests] == [["one"], ["two"]]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Basic dXNlcjpwYXNz=="},
        {"X-API-Key": "k", "Cookie": "a=b; c=d", "User-Agent": "site/1 (x)"},
        {"X": "a\tb  c"},
        {"X": "x" * 16_384},
        {"!#$%&'*+.^_`|~": "~"},
    ],
    ids=lambda headers: f"{headers!s:.30}",
)
def test_good_headers(headers: dict[str, str]) -> None:
    with serving(echo, headers=lambda: headers) as (server, destination):
        destination.deliver(claim())
        for name, value in headers.items():
            assert server.requests[0].values(name) == [value]


@pytest.mark.parametrize(
    "name",
    [
        "Host", "Content-Type", "content-type", "CONTENT-LENGTH", "Content-Encoding", "Accept", "Accept-Encoding",
        "Transfer-Encoding", "Connection", "Keep-Alive", "TE", "Trailer", "Upgrade", "Expect", "Proxy-Authorization",
        "X-Localization-Signature", "x-localization-key-id", "X-LOCALIZATION-ANYTHING",
        "", " ", "A B", "A:", "A\r\nB", "A\n", "\0", "é", "A(", "x" * 257, None, 1, b"Authorization",
    ],
)  # fmt: skip
def test_names_a_host_may_not_give(name: Any) -> None:
    with serving(echo, headers=lambda: {name: "x"}) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("authentication", False)
        assert server.connections == 0


@pytest.mark.parametrize(
    "value",
    [
        "", " ", " a", "a ", "a\r\nX-Evil: 1", "a\n", "a\rb", "a\0b", "a\x7f", "é", "€", "\ud800", "x" * 16_385,
        None, 1, b"x", ["x"],
    ],
    ids=lambda value: f"{value!a:.20}",
)  # fmt: skip
def test_values_a_host_may_not_give(value: Any) -> None:
    with serving(echo, headers=lambda: {"Authorization": value}) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("authentication", False)
        assert server.connections == 0


@pytest.mark.parametrize(
    "given",
    [None, "Authorization: x", [("Authorization", "x")], 1, {"Authorization": "a", "authorization": "b"}],
    ids=str,
)
def test_what_are_no_headers(given: Any) -> None:
    with serving(echo, headers=lambda: given) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("authentication", False)
        assert server.connections == 0


def test_what_a_headers_callable_raises_stays_inside() -> None:
    def leaky() -> Mapping[str, str]:
        raise RuntimeError("Bearer secret")

    with serving(echo, headers=leaky) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable) == ("authentication", False)
        assert list(chain(error)) == [error]
        assert server.connections == 0


def test_a_host_that_knows_better_says_so() -> None:
    def down() -> Mapping[str, str]:
        raise DeliveryFailed("token_service", retryable=True, retry_after=9.0) from RuntimeError("Bearer secret")

    with serving(echo, headers=down) as (server, destination):
        error = failure(destination)
        assert (error.code, error.retryable, error.retry_after) == ("token_service", True, 9.0)
        assert list(chain(error)) == [error]
        assert server.connections == 0


# -- secrets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        hang_up,
        reply(500, {"echo": "Confidential draft"}),
        raw(b"HTTP/1.1 200 OK\r\nConfidential draft\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\nConfidential draft", close=True),
        whole(canonical(accepted(plan_id="Confidential draft"))),
        whole(b"{Confidential draft"),
        reply(302, None, ("Location", "https://user:Bearer-token@a.test")),
    ],
)
def test_no_failure_quotes_anything(answer: Answer) -> None:
    secrets = ("Confidential", "Bearer", KEY.decode(), signer().sign(claim().payload.encode())[2])
    with serving(answer, headers=lambda: {"Authorization": "Bearer-token"}) as (_, destination):
        error = failure(destination, claim(source_text="Confidential draft"))
        for text in (said(error), repr(destination), repr(signer()), str(vars(error))):
            assert not any(secret in text for secret in secrets)
        for link in chain(error):
            assert isinstance(link, OutboxError)
            assert link.__traceback__ is None or "httpx" not in str(type(link))


def test_reprs() -> None:
    destination = CMSDestination("https://CMS.example.com:8443", signer(), headers=dict, timeout=5)
    assert repr(destination) == "CMSDestination('https://cms.example.com:8443', timeout=5)"
    assert repr(signer()) == f"HMACSigner(key_id='{KEY_ID}')"


# -- construction -----------------------------------------------------------------------------------------------------


def test_a_destination() -> None:
    destination = CMSDestination(ORIGIN, signer())
    assert isinstance(destination, Destination)
    assert destination.timeout == 30.0


@pytest.mark.parametrize(
    "origin",
    [None, "", "cms.example.com", "http://cms.example.com", "https://cms.example.com/", "https://u:secret@a.test"],
)
def test_bad_origins(origin: Any) -> None:
    for allowed in (False, True):
        with pytest.raises(InputError) as caught:
            CMSDestination(origin, signer(), allow_loopback_http=allowed)
        assert caught.value.code == "destination.origin_invalid"
        assert "secret" not in said(caught.value)


def test_plain_http_to_loopback_only_where_allowed() -> None:
    with pytest.raises(InputError) as caught:
        CMSDestination("http://127.0.0.1:8080", signer())
    assert caught.value.code == "destination.origin_invalid"
    CMSDestination("http://127.0.0.1:8080", signer(), allow_loopback_http=True)


@pytest.mark.parametrize("timeout", [0.001, 1, 30, 86_400, 86_400.0])
def test_good_timeouts(timeout: float) -> None:
    assert CMSDestination(ORIGIN, signer(), timeout=timeout).timeout == timeout


@pytest.mark.parametrize(
    "timeout",
    [0, 0.0, -1, 86_400.1, math.nan, math.inf, 10**400, True, False, None, "30", [30]],
    ids=lambda value: f"{value!s:.9}",
)
def test_bad_timeouts(timeout: Any) -> None:
    with pytest.raises(InputError) as caught:
        CMSDestination(ORIGIN, signer(), timeout=timeout)
    assert caught.value.code == "destination.timeout_invalid"


@pytest.mark.parametrize("bad", [None, "key", b"key", object(), lambda body: ("a", "k", "s")])
def test_bad_signers(bad: Any) -> None:
    with pytest.raises(InputError) as caught:
        CMSDestination(ORIGIN, bad)
    assert caught.value.code == "destination.signer_invalid"


@pytest.mark.parametrize("bad", [{}, {"Authorization": "x"}, "x", 1, True])
def test_bad_header_callables(bad: Any) -> None:
    with pytest.raises(InputError) as caught:
        CMSDestination(ORIGIN, signer(), headers=bad)
    assert caught.value.code == "destination.headers_invalid"


@pytest.mark.parametrize("part", ["origin", "signer", "key", "headers", "timeout"])
def test_every_code_is_explained(part: str) -> None:
    assert CODES[f"destination.{part}_invalid"]
