"""Which files of checkpoints are sent and held, when, and under which names; each connection is the test's own."""

import json
import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent import copies
from mlbench_cli.agent.copies import Copies
from tests.fakes.clock import Clock


class Selector:
    """Keeps what is to be called when a connection has something to read or room to write."""

    def __init__(self) -> None:
        self.calls: dict[Any, Callable[[], None]] = {}

    def register(self, what: Any, events: int, call: Callable[[], None]) -> None:
        assert events in (selectors.EVENT_READ, selectors.EVENT_WRITE)
        self.calls[what] = call

    def unregister(self, what: Any) -> None:
        del self.calls[what]


class Sending:
    """A connection that only notes what it is to send."""

    made: list["Sending"]

    def __init__(self, place: object, selector: object, on_sent: Callable[[bool], None]) -> None:
        self.place, self.on_sent = place, on_sent
        self.files: list[tuple[str, Any]] = []
        self.is_idle, self.is_closed = True, False
        Sending.made.append(self)

    def send(self, path: str, header: object) -> None:
        self.files.append((path, header))
        self.is_idle = False

    def close(self) -> None:
        self.is_closed = True


class Lab:
    """The copies of node 1, at a time that the test says."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock, self.selector = folder, clock, Selector()
        selector: Any = self.selector
        self.copies = Copies(selector, 1)
        self.held: list[tuple[int, int]] = []
        self.copies.on_held = lambda node, update: self.held.append((node, update))
        self.ends: list[socket.socket] = []

    def begin(self, attempt: int = 0, after: int | None = None, *, sends: bool = True) -> None:
        place = ("192.0.2.2", 4711) if sends else None
        self.copies.begin("secret", attempt, place, str(self.folder), ["rank-1.pt", "rank-2.pt"], after)

    def write(self, update: int, *names: str) -> None:
        (self.folder / str(update)).mkdir(exist_ok=True)
        for name in names:
            (self.folder / str(update) / name).touch()

    def turn(self, seconds: float) -> None:
        self.clock.now += seconds
        self.copies.on_time(self.clock.now)

    def sent(self) -> list[str]:
        """The files that were sent over the last connection, in their order."""
        if not Sending.made:
            return []
        return [path.removeprefix(f"{self.folder}/") for path, _ in Sending.made[-1].files]

    def finish_file(self) -> None:
        Sending.made[-1].is_idle = True
        Sending.made[-1].on_sent(True)

    def connect(self) -> socket.socket:
        """Another machine connects; the end of this test."""
        known = set(self.selector.calls)
        end = socket.create_connection(("127.0.0.1", self.copies.port))
        self.ends.append(end)
        server = next(iter(self.selector.calls))
        while set(self.selector.calls) == known:
            self.selector.calls[server]()
        return end

    def deliver(self, end: socket.socket, data: bytes) -> bool:
        """Send bytes, none: its end; whether the connection is still open when they have been read."""
        if data:
            end.sendall(data)
        else:
            end.shutdown(socket.SHUT_WR)
        other = next(what for what in self.selector.calls if is_peer(what, end))
        other.settimeout(5)
        self.selector.calls[other]()
        return other in self.selector.calls


def is_peer(what: socket.socket, end: socket.socket) -> bool:
    try:
        return bool(what.getpeername() == end.getsockname())
    except OSError:  # the one that listens
        return False


def announce(content: bytes, **changes: Any) -> bytes:
    """A file as another agent sends it."""
    header = {"token": "secret", "node": 2, "attempt": 0, "update": 5, "name": "rank-3.pt", "size": len(content)}
    return json.dumps({**header, **changes}).encode() + b"\n" + content


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    clock = Clock(1000.0)
    monkeypatch.setattr("mlbench_cli.agent.copies.time", clock)
    monkeypatch.setattr(Sending, "made", [], raising=False)
    monkeypatch.setattr(copies, "_Sending", Sending)
    made = Lab(tmp_path, clock)
    yield made
    for connection in (*made.ends, *made.selector.calls):
        connection.close()


# --- what is sent ---------------------------------------------------------------------------------------------------


def test_the_latest_files_are_sent_first_and_each_once(lab: Lab) -> None:
    lab.begin()
    for update in (5, 10, 15, 20):
        lab.write(update, "rank-1.pt", "rank-2.pt", "main.pt")
    lab.turn(0.0)
    for _ in range(8):
        lab.finish_file()
    latest = [f"{update}/{name}" for update in (20, 15, 10) for name in ("rank-1.pt", "rank-2.pt")]
    assert lab.sent() == latest  # as many checkpoints as ranks keep
    ((path, header), *_) = Sending.made[0].files
    assert path == f"{lab.folder}/20/rank-1.pt"
    assert header == {"token": "secret", "node": 1, "attempt": 0, "update": 20, "name": "rank-1.pt"}
    assert (len(Sending.made), Sending.made[0].place) == (1, ("192.0.2.2", 4711))


def test_only_files_behind_the_checkpoint_of_the_start_are_sent(lab: Lab) -> None:
    lab.begin(after=10)
    for update in (9, 10, 11):
        lab.write(update, "rank-1.pt")
    lab.turn(0.0)
    for _ in range(3):
        lab.finish_file()
    assert lab.sent() == ["11/rank-1.pt"]


def test_updates_are_ordered_as_numbers_and_other_files_are_no_checkpoints(lab: Lab) -> None:
    lab.begin()
    for update in (9, 10):
        lab.write(update, "rank-1.pt")
    (lab.folder / "training-0-0").touch()
    (lab.folder / "-5").mkdir()
    lab.turn(0.0)
    lab.finish_file()
    assert lab.sent() == ["10/rank-1.pt", "9/rank-1.pt"]


def test_files_are_looked_for_four_times_a_second(lab: Lab) -> None:
    lab.begin()
    lab.turn(0.0)
    assert lab.copies.next_look == 1000.25
    lab.write(5, "rank-1.pt")
    lab.turn(0.2)
    assert lab.sent() == []
    lab.turn(0.05)
    assert lab.sent() == ["5/rank-1.pt"]
    lab.write(10, "rank-1.pt")
    lab.turn(0.25)
    assert lab.sent() == ["5/rank-1.pt"]  # which is still on its way
    Sending.made[0].is_idle = True
    lab.turn(0.25)
    assert lab.sent() == ["5/rank-1.pt", "10/rank-1.pt"]


def test_without_a_holder_nothing_is_looked_for(lab: Lab) -> None:
    lab.begin(sends=False)
    lab.write(5, "rank-1.pt")
    assert lab.copies.next_look == float("inf")
    lab.turn(1e9)
    assert lab.sent() == []


def test_a_folder_that_is_not_there_yet_is_no_error(lab: Lab) -> None:
    lab.folder = lab.folder / "none"
    lab.begin()
    lab.turn(0.0)
    assert lab.sent() == []


def test_a_machine_that_was_not_reached_gets_everything_two_seconds_later(lab: Lab) -> None:
    lab.begin()
    lab.write(5, "rank-1.pt", "rank-2.pt")
    lab.turn(0.0)
    lab.finish_file()
    Sending.made[0].on_sent(False)
    assert Sending.made[0].is_closed
    lab.turn(1.9)
    assert len(Sending.made) == 1
    lab.turn(0.25)
    lab.finish_file()
    assert (len(Sending.made), lab.sent()) == (2, ["5/rank-1.pt", "5/rank-2.pt"])


def test_another_attempt_begins_with_another_connection(lab: Lab) -> None:
    lab.begin()
    lab.write(5, "rank-1.pt")
    lab.turn(0.0)
    lab.begin(attempt=1)
    assert Sending.made[0].is_closed
    lab.turn(0.0)
    assert Sending.made[1].files[0][1]["attempt"] == 1


# --- what is held ---------------------------------------------------------------------------------------------------


def test_files_that_come_are_held_under_their_last_name(lab: Lab) -> None:
    lab.begin()
    end = lab.connect()
    assert lab.deliver(end, announce(b"one") + announce(b"", name="../../main.pt") + announce(b"two", update=10))
    assert lab.copies.names() == {5: {"rank-3.pt", "main.pt"}, 10: {"rank-3.pt"}}
    assert lab.held == [(2, 5), (2, 5), (2, 10)]
    lab.copies.restore([2], 5, str(lab.folder / "back"))
    assert sorted(path.name for path in (lab.folder / "back/5").iterdir()) == ["main.pt", "rank-3.pt"]
    assert (lab.folder / "back/5/rank-3.pt").read_bytes() == b"one"
    lab.copies.restore([2], 7, str(lab.folder / "back"))
    lab.copies.restore([3], 5, str(lab.folder / "back"))
    assert [path.name for path in (lab.folder / "back").iterdir()] == ["5"]


def test_a_file_in_pieces_is_held_when_its_last_byte_has_come(lab: Lab) -> None:
    lab.begin()
    end = lab.connect()
    data = announce(b"content")
    for cut in (10, len(data) - 1):
        lab.deliver(end, data[:cut] if cut == 10 else data[10:cut])
        assert lab.held == []
    lab.deliver(end, data[-1:])
    assert lab.held == [(2, 5)]


@pytest.mark.parametrize(("attempt", "is_held"), [(1, False), (2, True), (3, True)])
def test_files_of_an_attempt_of_the_past_are_dropped(lab: Lab, attempt: int, is_held: bool) -> None:
    """Its ranks write that checkpoint again. Another machine may be ahead by a moment."""
    lab.begin(attempt=2)
    end = lab.connect()
    assert lab.deliver(end, announce(b"x", attempt=attempt))
    assert (lab.copies.names() != {}, lab.held != []) == (is_held, is_held)


def test_of_each_machine_the_last_three_checkpoints_are_held(lab: Lab) -> None:
    lab.begin()
    end = lab.connect()
    for update in (9, 10, 11, 8, 12):
        lab.deliver(end, announce(b"x", update=update))
    lab.deliver(end, announce(b"x", update=1, node=3))
    assert sorted(lab.copies.names()) == [1, 10, 11, 12]


def test_what_was_written_after_the_checkpoint_of_the_start_is_forgotten(lab: Lab) -> None:
    lab.begin()
    end = lab.connect()
    for update in (5, 10, 15):
        lab.deliver(end, announce(b"x", update=update))
    lab.begin(attempt=1, after=10)
    assert sorted(lab.copies.names()) == [5, 10]
    lab.begin(attempt=2)
    assert lab.copies.names() == {}


@pytest.mark.parametrize(
    "changes", [{"token": "guess"}, {"token": None}, {"size": "many"}, {"size": None}, {"node": "x"}, {"name": 7}]
)
def test_a_stranger_is_not_listened_to_any_further(lab: Lab, changes: dict[str, Any]) -> None:
    lab.begin()
    end = lab.connect()
    assert not lab.deliver(end, announce(b"x", **changes) + announce(b"x"))
    assert (lab.copies.names(), lab.held) == ({}, [])


@pytest.mark.parametrize(("length", "is_open"), [(4096, True), (4097, False)])
def test_a_header_has_an_end(lab: Lab, length: int, is_open: bool) -> None:
    lab.begin()
    assert lab.deliver(lab.connect(), b"{" * length) is is_open


def test_a_machine_that_goes_away_leaves_nothing_behind(lab: Lab) -> None:
    lab.begin()
    end = lab.connect()
    lab.deliver(end, announce(b"content")[:-1])
    known = len(lab.selector.calls)
    assert not lab.deliver(end, b"")
    assert (len(lab.selector.calls), lab.held) == (known - 1, [])
