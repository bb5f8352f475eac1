"""Copies of checkpoints between two agents of one process, over real sockets."""

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlbench_cli.agent.copies import KEPT, Copies

CONTENT = b"part of rank 1" * 400_000  # several pieces


class Pair:
    """Node 1 sends to node 2."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.folder = folder
        self.sender, self.holder = (Copies(self.selector, node) for node in (1, 2))

    def begin(self, attempt: int = 0, after: int | None = None, token: str = "secret", port: int | None = None) -> None:
        self.holder.begin("secret", attempt, None, str(self.folder), [], after)
        place = ("127.0.0.1", port or self.holder.port)
        self.sender.begin(token, attempt, place, str(self.folder), ["rank-1.pt"], after)

    def write(self, update: int, content: bytes = CONTENT, name: str = "rank-1.pt") -> None:
        place = self.folder / str(update)
        place.mkdir(exist_ok=True)
        (place / name).write_bytes(content)

    def turn(self, seconds: float = 0.05) -> None:
        for key, _ in self.selector.select(seconds):
            key.data()
        self.sender.on_time(time.monotonic())

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            self.turn()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "checkpoints").mkdir()
    found = Pair(tmp_path / "checkpoints")
    yield found
    for key in list(found.selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    found.selector.close()


def test_the_last_checkpoints_are_held_and_written_again(pair: Pair, tmp_path: Path) -> None:
    held: list[tuple[int, int]] = []
    pair.holder.on_held = lambda node, update: held.append((node, update))
    pair.begin()
    for update in range(1, KEPT + 3):
        pair.write(update, CONTENT + str(update).encode())
        pair.write(update, b"another machine's", "rank-0.pt")
        pair.until(lambda update=update: update in pair.holder.names())  # type: ignore[misc]
    assert held == [(1, update) for update in range(1, KEPT + 3)]
    assert pair.holder.names() == {update: {"rank-1.pt"} for update in (3, 4, 5)}
    pair.holder.restore([1], 4, str(tmp_path / "back"))
    assert (tmp_path / "back/4/rank-1.pt").read_bytes() == CONTENT + b"4"
    pair.holder.restore([0, 3], 5, str(tmp_path / "back"))
    assert not (tmp_path / "back/5").exists()


def test_checkpoints_that_are_written_again_replace_what_was_held(pair: Pair, tmp_path: Path) -> None:
    pair.begin()
    pair.write(7)
    pair.write(9)
    pair.until(lambda: 9 in pair.holder.names() and 7 in pair.holder.names())
    pair.begin(attempt=1, after=7)
    assert pair.holder.names() == {7: {"rank-1.pt"}}
    pair.write(9, b"again")
    pair.until(lambda: 9 in pair.holder.names())
    pair.holder.restore([1], 9, str(tmp_path / "back"))
    assert (tmp_path / "back/9/rank-1.pt").read_bytes() == b"again"


def test_a_machine_that_does_not_answer_yet_is_tried_again(pair: Pair) -> None:
    with socket.socket() as closed:  # it has a port, but does not listen
        closed.bind(("127.0.0.1", 0))
        pair.begin(port=closed.getsockname()[1])
        pair.write(1)
        for _ in range(20):
            pair.turn(0.02)
        assert not pair.holder.names()
    pair.sender._place = ("127.0.0.1", pair.holder.port)
    pair.until(lambda: 1 in pair.holder.names())


def test_strangers_and_attempts_of_the_past_are_not_kept(pair: Pair) -> None:
    pair.begin(token="guess")
    pair.write(1)
    with socket.create_connection(("127.0.0.1", pair.holder.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 10_000)
        stranger.setblocking(False)
        pair.until(lambda: is_closed(stranger))
    pair.begin()
    pair.holder.begin("secret", 1, None, str(pair.folder), [], None)
    pair.until(lambda: pair.sender._sending is not None and pair.sender._sending.is_idle)
    for _ in range(20):
        pair.turn(0.02)
    assert not pair.holder.names()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
