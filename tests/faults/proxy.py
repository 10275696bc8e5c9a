"""A TCP proxy that looks at what passes through and cuts, swallows or halves it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

Direction = Literal["up", "down"]
#: Let it pass; cut the connection instead, after, or in the middle of it; or swallow all that comes from now on.
Verdict = Literal["pass", "cut", "pass_and_cut", "halve", "silence"]


@dataclass(eq=False)
class Passage:
    """One connection through the proxy. ``note`` is for rules to remember something by."""

    client: socket.socket
    server: socket.socket
    silent: threading.Event = field(default_factory=threading.Event)
    note: str = ""

    def cut(self) -> None:
        """Reset both sides, as a middlebox does that has lost its state."""
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self.client, self.server):
            end.close()


Rule = Callable[[Passage, Direction, bytes], Verdict]


def _pass_all(passage: Passage, direction: Direction, data: bytes) -> Verdict:
    return "pass"


class Proxy:
    """Forwards connections to a port, under a rule that may be changed at any time.

    Attributes:
        port: where to connect.
        cuts: how many connections have been cut or silenced.
    """

    def __init__(self, target: int, port: int = 0, *, host: str = "127.0.0.1") -> None:
        self._target = (host, target)
        self._rule: Rule = _pass_all
        self._lock = threading.Lock()
        self._passages: set[Passage] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.cuts = 0
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def behave(self, rule: Rule | None) -> None:
        """Judge what passes by this rule from now on."""
        self._rule = rule or _pass_all

    def silence(self) -> int:
        """Forward nothing more on the connections there are, without closing them; return how many those are."""
        with self._lock:
            for passage in self._passages:
                passage.silent.set()
            self.cuts += len(self._passages)
            return len(self._passages)

    def cut_all(self) -> int:
        """Reset the connections there are; return how many those were."""
        with self._lock:
            for passage in self._passages:
                passage.cut()
            self.cuts += len(self._passages)
            return len(self._passages)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for passage in self._passages:
                passage.cut()
        for thread in list(self._threads):
            thread.join(10)
        self._listener.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="proxy", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:  # nobody is there; the client finds out by being hung up on
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            passage = Passage(client, server)
            with self._lock:
                self._passages.add(passage)
            self._start(self._serve, passage)

    def _serve(self, passage: Passage) -> None:
        down = threading.Thread(target=self._pump, args=(passage, "down"), name="proxy-down", daemon=True)
        down.start()
        self._pump(passage, "up")
        down.join()
        with self._lock:
            self._passages.discard(passage)
        passage.close()

    def _pump(self, passage: Passage, direction: Direction) -> None:
        source, sink = passage.client, passage.server
        if direction == "down":
            source, sink = sink, source
        with suppress(OSError):
            while data := source.recv(65_536):
                if not self._forward(passage, direction, data, sink):
                    break
        if passage.silent.is_set() and direction == "down":
            return  # the far side has gone, and the near side is not to hear of it
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        if direction == "up":
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)

    def _forward(self, passage: Passage, direction: Direction, data: bytes, sink: socket.socket) -> bool:
        """Do as the rule says; False once the connection is cut."""
        if passage.silent.is_set():
            return True
        verdict = self._rule(passage, direction, data)
        if verdict in ("pass", "pass_and_cut"):
            sink.sendall(data)
        elif verdict == "halve":
            sink.sendall(data[: len(data) // 2])
        if verdict == "pass":
            return True
        with self._lock:
            self.cuts += 1
        if verdict == "silence":
            passage.silent.set()
            return True
        if verdict == "halve":  # let the half arrive; a reset could overtake it
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            return False
        if verdict == "pass_and_cut":
            passage.silent.set()  # what comes back is not to arrive
            with suppress(OSError):
                passage.client.shutdown(socket.SHUT_RDWR)
            return False
        passage.cut()
        return False
