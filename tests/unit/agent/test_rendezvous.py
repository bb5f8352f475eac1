"""Links between the agents of one run: when the other side is given up, and what ends a link."""

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import rendezvous
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


def test_whatever_comes_keeps_a_link(pair: Pair) -> None:
    begun, pair.now = pair.now, pair.now + SILENT_SECONDS
    pair.other.sendall(b'{"ping": true}\n')
    pair.read()
    assert pair.messages == [{"ping": True}]
    pair.link.tick(begun + SILENT_SECONDS + 1)
    assert pair.link.is_open


def test_a_link_pings_once_its_other_side_is_known_and_once_in_a_while(pair: Pair) -> None:
    pair.link.tick(pair.now)
    pair.link.node = 1
    for seconds in (0.0, PING_SECONDS - 1, PING_SECONDS):
        pair.link.tick(pair.now + seconds)
    pair.link.close()
    assert pair.other.recv(1000) == b'{"ping": true}\n' * 2


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


def test_a_link_ends_with_its_other_side(pair: Pair) -> None:
    pair.other.close()
    pair.read()
    assert pair.ends == [pair.link]


def test_what_is_needed_to_reach_the_hub_is_for_its_owner_only(tmp_path: Path) -> None:
    assert rendezvous.read_rendezvous(str(tmp_path)) is None
    server, token = rendezvous.open_hub(str(tmp_path), ["192.0.2.1", "127.0.0.1"])
    with server:
        assert (tmp_path / rendezvous.RENDEZVOUS).stat().st_mode & 0o777 == 0o600
        note = rendezvous.read_rendezvous(str(tmp_path))
        assert note is not None
        assert note["port"] == server.getsockname()[1]
        reached = rendezvous.connect_to_hub({**note, "addresses": ["127.0.0.1"]}, 5.0)
        assert reached is not None
        reached.close()
    assert rendezvous.is_token(token, token)
    assert not rendezvous.is_token(token[:-1], token)
    assert not rendezvous.is_token(None, token)
    assert rendezvous.connect_to_hub({"addresses": ["127.0.0.1"], "port": note["port"]}, 1.0) is None


def test_a_hub_may_be_told_its_port_and_token(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
    server, token = rendezvous.open_hub(str(tmp_path), ["192.0.2.1"], {"port": port, "token": "secret"})
    with server:
        assert (server.getsockname()[1], token) == (port, "secret")
        assert not server.getblocking()
    assert rendezvous.read_rendezvous(str(tmp_path)) == {"addresses": ["192.0.2.1"], "port": port, "token": "secret"}


def test_every_hub_has_a_new_token_of_128_bits(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(2):
        server, token = rendezvous.open_hub(str(tmp_path), [])
        server.close()
        tokens.add(token)
        assert len(bytes.fromhex(token)) == 16
    assert len(tokens) == 2


def test_a_half_written_note_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / rendezvous.RENDEZVOUS).write_text('{"addresses": [')
    assert rendezvous.read_rendezvous(str(tmp_path)) is None


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = rendezvous.connect_to_hub({"addresses": ["127.0.0.2", "127.0.0.1"], "port": port}, 5.0)
        assert found is not None
        with found:
            assert found.getpeername() == ("127.0.0.1", port)


def test_a_message_is_one_line_of_json_and_nothing_is_sent_after_the_end(pair: Pair) -> None:
    pair.link.send({"go": ["a\nb"], "port": 1})
    assert pair.other.recv(1000) == b'{"go": ["a\\nb"], "port": 1}\n'
    pair.link.close()
    pair.link.send({"more": True})
    assert pair.other.recv(1000) == b""
    assert pair.ends == [pair.link]
    assert not pair.selector.get_map()


def test_json_that_is_no_object_is_ignored_and_the_link_stays(pair: Pair) -> None:
    pair.other.sendall(b'[1]\n"word"\n7\nnull\n{"node": 3}\n')
    pair.read()
    assert pair.messages == [{"node": 3}]
    assert pair.link.is_open


def test_messages_after_one_that_closed_the_link_are_not_delivered(pair: Pair) -> None:
    def close_after(link: RankLink, message: Any) -> None:
        pair.messages.append(message)
        link.close()

    pair.link._on_message = close_after
    pair.other.sendall(b'{"node": 1}\n{"node": 2}\n')
    pair.read()
    assert pair.messages == [{"node": 1}]


def test_small_messages_go_at_once_and_nobody_waits_for_them(pair: Pair) -> None:
    """Nagle's algorithm would hold the second of two small messages until the first is acknowledged."""
    assert not pair.link.connection.getblocking()
    assert pair.link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert (pair.link.node, pair.link.name, pair.link.lock_identity) == (None, "", None)
    assert (pair.link.clock_offset, pair.link.has_left) == (0.0, False)


def test_a_link_is_silent_for_a_minute_and_pings_six_times_in_it(pair: Pair) -> None:
    pair.link.node = 1
    for seconds in range(61):
        pair.link.tick(pair.now + seconds)
    assert pair.ends == []
    pair.link.tick(pair.now + 60.5)
    assert pair.ends == [pair.link]
    assert pair.other.recv(1000).count(b"ping") == 7  # with the first, at once


def test_what_does_not_fit_into_the_sockets_buffer_ends_the_link(pair: Pair) -> None:
    """The agent must not wait for a machine that reads nothing."""
    for end in (pair.link.connection, pair.other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    pair.link.send({"big": "x" * (1 << 20)})
    assert (pair.link.is_open, pair.ends) == (False, [pair.link])


@pytest.mark.parametrize(("held", "is_open"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_a_line_is_a_mebibyte_at_most(pair: Pair, held: int, is_open: bool) -> None:
    pair.link._buffer = b"x" * held
    pair.other.sendall(b"x")
    pair.read()
    assert pair.link.is_open is is_open
