"""Connections that have not authenticated: how long they may, how many there may be, and who is dropped first."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from uvicorn.protocols.http.h11_impl import H11Protocol

from mlbench_cli.server import connections
from mlbench_cli.server.config import ADMIT
from mlbench_cli.server.connections import GuardedProtocol


class Timer:
    """A call that is due at a time; `run` makes it."""

    def __init__(self, seconds: float, call: Any) -> None:
        self.seconds, self.call, self.cancelled = seconds, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop that keeps what is to be called later."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Any, *given: Any) -> Timer:
        self.timers.append(Timer(seconds, lambda: call(*given)))
        return self.timers[-1]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    found = Loop()
    monkeypatch.setattr(H11Protocol, "__init__", lambda self: None)
    monkeypatch.setattr(H11Protocol, "connection_made", lambda self, transport: None)
    monkeypatch.setattr(
        H11Protocol, "connection_lost", lambda self, error: found.__dict__.setdefault("lost", []).append(self)
    )
    monkeypatch.setattr(GuardedProtocol, "_strangers", {})
    monkeypatch.setattr(GuardedProtocol, "app", None, raising=False)
    monkeypatch.setattr(GuardedProtocol, "loop", found, raising=False)
    return found


def connect() -> tuple[GuardedProtocol, list[str]]:
    """A new connection, and what has happened to its transport."""
    happened: list[str] = []
    protocol = GuardedProtocol()
    protocol.transport = SimpleNamespace(abort=lambda: happened.append("abort"))  # type: ignore[assignment]
    protocol.connection_made(protocol.transport)
    return protocol, happened


def test_a_stranger_is_dropped_after_two_seconds_in_four_looks(loop: Loop) -> None:
    protocol, happened = connect()
    for _ in range(4):
        assert (happened, protocol in GuardedProtocol._strangers) == ([], True)
        loop.timers[-1].call()
    assert (happened, GuardedProtocol._strangers) == (["abort"], {})
    assert [timer.seconds for timer in loop.timers] == [0.5] * 4


def test_a_connection_that_authenticates_stays(loop: Loop) -> None:
    protocol, happened = connect()
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], receive, send))
        scope[ADMIT]()
        scope[ADMIT]()  # a second request on the same connection

    asyncio.run(protocol._with_admission(app)({"path": "/x"}, "receive", "send"))  # type: ignore[arg-type]
    assert seen == [("/x", "receive", "send")]
    assert loop.timers[0].cancelled
    assert (happened, GuardedProtocol._strangers) == ([], {})


def test_a_connection_that_was_closed_is_forgotten(loop: Loop) -> None:
    protocol, happened = connect()
    protocol.connection_lost(None)
    assert (happened, GuardedProtocol._strangers, loop.__dict__["lost"]) == ([], {}, [protocol])
    assert loop.timers[0].cancelled


def test_one_stranger_too_many_drops_the_oldest(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 2)
    made = [connect() for _ in range(2)]
    made[0][0]._admit()
    made += [connect() for _ in range(2)]
    # The first one had authenticated; of the three others only two may stay.
    assert [happened for _, happened in made] == [[], ["abort"], [], []]
    assert list(GuardedProtocol._strangers) == [made[2][0], made[3][0]]
