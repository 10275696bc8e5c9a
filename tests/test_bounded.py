"""Connections of programs of ours give up on a server that acknowledges and never answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, make_url, text

from outbox import DatabaseError, Outbox
from outbox.contracts.cms import CMS_CHANGE
from outbox.dialects.engines import program_engine
from tests.faults.proxy import Proxy


@pytest.fixture
def proxy(pg_url: str) -> Iterator[Proxy]:
    url = make_url(pg_url)
    with Proxy(url.port or 5432, host=url.host or "127.0.0.1") as proxy:
        yield proxy


@pytest.fixture
def patient_engine(pg_url: str, proxy: Proxy) -> Iterator[Engine]:
    """An engine through the proxy, with half a second of patience."""
    url = make_url(pg_url).set(host="127.0.0.1", port=proxy.port)
    engine = program_engine(url, answer_seconds=0.5)
    yield engine
    engine.dispose()


def test_a_connection_that_has_gone_silent_is_replaced(patient_engine: Engine, proxy: Proxy) -> None:
    """The pool's own look at it (pre-ping) would wait for ever."""
    outbox = Outbox(patient_engine, contracts=(CMS_CHANGE,))
    assert outbox.claim("w1") is None
    assert proxy.silence() == 1
    assert outbox.claim("w1") is None  # on a new connection


def test_a_transaction_that_has_gone_silent_is_given_up(patient_engine: Engine, proxy: Proxy) -> None:
    outbox = Outbox(patient_engine, contracts=(CMS_CHANGE,))
    with pytest.raises(DatabaseError) as caught:
        _silenced_halfway(outbox, proxy)
    assert caught.value.code == "dispatch.database_unavailable"
    assert outbox.health().status == "ok"


def _silenced_halfway(outbox: Outbox, proxy: Proxy) -> None:
    with outbox._transaction(None, write=True) as (connection, _, _, _):
        proxy.silence()
        connection.execute(text("SELECT 1"))


def test_patience_is_for_each_statement(patient_engine: Engine) -> None:
    with patient_engine.connect() as connection:
        for _ in range(4):
            connection.execute(text("SELECT pg_sleep(0.2)"))
        assert connection.execute(text("SELECT repeat('x', 1000000)")).scalar_one() == "x" * 1_000_000


def test_migrating_is_waited_for(pg_url: str) -> None:
    """An index over many rows takes longer than any answer to a worker."""
    engine = program_engine(pg_url, create=True, answer_seconds=None)
    with engine.connect() as connection:
        assert not hasattr(connection.connection.driver_connection, "patience")
    engine.dispose()


def test_a_worker_is_still_woken_and_a_silent_listener_is_replaced(
    patient_engine: Engine, pg_engine: Engine, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.dialects.postgresql._Listener.SIGN_OF_LIFE", 0.1)
    monkeypatch.setattr("outbox.dialects.postgresql._Listener.PATIENCE", 0.1)
    woken = threading.Event()
    watch = Outbox(patient_engine, contracts=(CMS_CHANGE,)).watch()
    watch.start(woken.set)
    try:
        for _ in range(2):
            assert woken.wait(30)  # it listens, for the first time or again
            woken.clear()
            with pg_engine.begin() as connection:
                connection.execute(text("SELECT pg_notify('outbox_event', 'cms.change')"))
            assert woken.wait(30)
            woken.clear()
            assert proxy.silence() > 0
    finally:
        watch.close()
