"""A localization service that costs almost nothing: it answers every change, in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.events import response
from outbox.values import canonical_json

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_EVENT_ID = re.compile(rb'"event_id":"([A-Za-z0-9_.:-]+)"')
_TEMPLATE = canonical_json(response("@"), code="response_json").encode()


class _Service(asyncio.Protocol):
    """Just enough HTTP/1.1 for clients that behave; requests may come in pieces."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end + 2)
            total = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < total:
                return
            self._transport.write(_answer(self._buffer[end + 4 : total]))
            self._buffer = self._buffer[total:]


def _answer(body: bytes) -> bytes:
    found = _EVENT_ID.search(body)
    text = _TEMPLATE.replace(b"@", found[1] if found else b"none")
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)


def _serve(ready: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_Service, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextmanager
def service() -> Iterator[str]:
    """The origin of a service that runs until the end of the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()
