"""Links between the agents of one run: when the other side is given up, and what ends a link."""

import contextlib
import json
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import link, rendezvous
from mlbench_cli.agent.rendezvous import MAX_LINE, PING_SECONDS, SILENT_SECONDS, RankLink


class Pair:
    """A link and the bare socket at its other end, on a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("mlbench_cli.agent.rendezvous.time.monotonic", lambda: self.now)
        self.messages: list[Any] = []
        self.ends: list[RankLink] = []
        self.selector = selectors.DefaultSelector()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.other = socket.create_connection(server.getsockname())
            own, _ = server.accept()
        self.link = RankLink(own, self.selector, lambda _, message: self.messages.append(message), self.ends.append)

    def read(self) -> None:
        for key, _ in self.selector.select(5.0):
            key.data()

    def close(self) -> None:
        self.link.close()
        self.other.close()
        self.selector.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    found = Pair(monkeypatch)
    yield found
    found.close()


def test_a_silent_link_is_given_up_after_its_limit_and_not_before(pair: Pair) -> None:
    pair.link.tick(pair.now + SILENT_SECONDS)
    assert pair.link.is_open
    pair.link.tick(pair.now + SILENT_SECONDS + 0.1)
    assert pair.ends == [pair.link]


def test_silence_while_this_process_stood_still_is_excused(pair: Pair) -> None:
    pair.link.excuse_silence(pair.now + 10)
    pair.link.tick(pair.now + 10 + SILENT_SECONDS)
    assert pair.link.is_open


def test_whatever_comes_keeps_a_link(pair: Pair) -> None:
    begun, pair.now = pair.now, pair.now + SILENT_SECONDS
    pair.other.sendall(b'{"do": "ping"}\n')
    pair.read()
    assert pair.messages == [{"do": "ping"}]
    pair.link.tick(begun + SILENT_SECONDS + 1)
    assert pair.link.is_open


def test_a_link_pings_once_its_other_side_is_known_and_once_in_a_while(pair: Pair) -> None:
    pair.link.tick(pair.now)
    pair.link.node = 1
    for seconds in (0.0, PING_SECONDS - 1, PING_SECONDS):
        pair.link.tick(pair.now + seconds)
    pair.link.close()
    assert pair.other.recv(1000) == b'{"do": "ping"}\n' * 2


@pytest.mark.parametrize("sent", [b"no json\n", b"x" * (MAX_LINE + (1 << 17))])
def test_nonsense_and_endless_lines_end_a_link_once(pair: Pair, sent: bytes) -> None:
    pair.other.setblocking(False)
    while sent and pair.link.is_open:
        sent = sent[pair.other.send(sent) :]
        pair.read()
    for _ in range(200):  # what the socket still holds
        if not pair.link.is_open:
            break
        pair.read()
    pair.link.close()
    assert pair.ends == [pair.link]
    assert pair.messages == []


def test_a_message_that_comes_in_pieces_is_one_message(pair: Pair) -> None:
    for piece in (b'{"node"', b': 1}\n{"nod', b'e": 2}\n'):
        pair.other.sendall(piece)
        pair.read()
    assert pair.messages == [{"node": 1}, {"node": 2}]


def test_what_does_not_fit_into_the_sockets_buffer_follows(pair: Pair) -> None:
    """As the names of a thousand machines do on a network, whose first buffers are small."""
    pair.link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    names = [f"node-{number}.cluster.example" for number in range(20_000)]
    pair.link.send({"go": names})
    pair.link.send({"ping": True})
    assert pair.link.is_open
    pair.other.setblocking(False)
    received = bytearray()
    while not received.endswith(b'{"ping": true}\n'):
        pair.read()
        with contextlib.suppress(BlockingIOError):
            received += pair.other.recv(1 << 16)
    assert json.loads(received.splitlines()[0]) == {"go": names}


def test_a_link_ends_with_its_other_side(pair: Pair) -> None:
    pair.other.close()
    pair.read()
    assert pair.ends == [pair.link]


def test_what_is_needed_to_reach_the_hub_is_for_its_owner_only(tmp_path: Path) -> None:
    assert link.read_note(str(tmp_path), rendezvous.RENDEZVOUS) is None
    server, token = rendezvous.open_hub(str(tmp_path), ["192.0.2.1", "127.0.0.1"])
    with server:
        assert (tmp_path / rendezvous.RENDEZVOUS).stat().st_mode & 0o777 == 0o600
        note = link.read_note(str(tmp_path), rendezvous.RENDEZVOUS)
        assert note is not None
        assert note["port"] == server.getsockname()[1]
        link.connect(["127.0.0.1"], note["port"], 5.0).close()
    assert link.is_token(token, token)
    assert not link.is_token(token[:-1], token)
    assert not link.is_token(None, token)
    with pytest.raises(OSError, match="refused"):
        link.connect(["127.0.0.1"], note["port"], 1.0)
