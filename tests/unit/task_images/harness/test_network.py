"""The probe of the network step by step: a clock and connections that the test controls, and rank 0's orders."""

import builtins
import io
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from task_images import contract
from task_images.harness import network, network_probe
from task_images.harness.network import (
    AFTER,
    BURST_BYTES,
    DRAIN_BYTES,
    FIRST_CHUNK,
    FULL,
    MAX_CHUNK,
    MAX_DRAIN_CHUNK,
    SHORT,
    Line,
    exchange_addresses,
    find_own_address,
    measure_network,
    read_counters,
)
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(network, "time", made)
    return made


class Wire:
    """A socket that receives given pieces, each after a pause, and notes what is sent."""

    def __init__(self, pieces: Iterable[bytes] = (), clock: Clock | None = None, *pauses: float) -> None:
        self._pieces, self._clock, self._pauses = deque(pieces), clock, deque(pauses)
        self.sent, self.is_closed, self.options = b"", False, []  # type: tuple[bytes, bool, list[object]]

    def settimeout(self, seconds: float) -> None:
        self.options.append(seconds)

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def send(self, data: memoryview) -> int:
        self.sent += bytes(len(data))
        return len(data)

    def recv(self, most: int) -> bytes:
        if self._clock is not None and self._pauses:
            self._clock.now += self._pauses.popleft()
        piece = self._pieces.popleft() if self._pieces else b""
        if len(piece) > most:
            self._pieces.appendleft(piece[most:])
        return piece[:most]

    def recv_into(self, buffer: bytearray, most: int) -> int:
        return len(self.recv(min(most, len(buffer))))

    def close(self) -> None:
        self.is_closed = True


def make_line(*pieces: bytes, clock: Clock | None = None, pauses: Sequence[float] = ()) -> tuple[Line, Wire]:
    wire = Wire(pieces, clock, *pauses)
    return Line(wire), wire  # type: ignore[arg-type]


# --- connections ----------------------------------------------------------------------------------------------------


def test_lines_and_bytes_are_read_wherever_packets_end() -> None:
    line, wire = make_line(b"fi", b"rst\nsecond\nx", b"y", b"third\n")
    assert [line.read(), line.read()] == ["first", "second"]
    assert [line.read_byte(), line.read_byte()] == [b"x", b"y"]
    assert line.read() == "third"
    assert line.read_byte() == b""
    with pytest.raises(ConnectionError, match="closed its connection"):
        line.read()
    line.write("answer")
    assert wire.sent == b"answer\n"
    assert wire.options == [network.STEP_SECONDS, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    line.close()
    assert wire.is_closed


@pytest.mark.parametrize(("extra", "fits"), [(0, True), (1, False)])
def test_a_line_has_at_most_four_mebibytes(extra: int, fits: bool) -> None:
    line, _ = make_line(*[b"x" * (1 << 16)] * 63, b"x" * ((1 << 16) - 1 + extra), b"\n")
    if fits:
        assert len(line.read()) == (1 << 22) - 1
        return
    line, _ = make_line(*[b"x" * (1 << 16)] * 64, b"x", b"\n")
    with pytest.raises(ValueError, match="endless line"):
        line.read()


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1])
def test_a_block_has_exactly_its_size(size: int) -> None:
    line, wire = make_line()
    line.send_block(size)
    assert len(wire.sent) == size


def test_a_rate_leaves_out_the_first_fifth_of_a_block(clock: Clock) -> None:
    """Ten pieces of 100 bytes: the first two are slow start, the others take 4.5 seconds."""
    line, _ = make_line(*[b"x" * 100] * 10, clock=clock, pauses=[5.0, 5.0, 1.0, *[0.5] * 7])
    assert line.receive_block(1000, bytearray(4096)) == pytest.approx(8 * 800 / 4.5)


def test_a_block_that_has_arrived_as_a_whole_has_a_rate(clock: Clock) -> None:
    """The kernel hands over what is asked for: the untimed fifth, and then the rest, after half a second."""
    line, _ = make_line(b"x" * 1000, clock=clock, pauses=[5.0, 0.5])
    assert line.receive_block(1000, bytearray(4096)) == pytest.approx(8 * 800 / 0.5)


def test_bytes_behind_the_last_line_belong_to_the_block(clock: Clock) -> None:
    line, _ = make_line(b"go\n" + b"x" * 30, b"x" * 70 + b"next\n", clock=clock, pauses=[1.0] * 4)
    assert line.read() == "go"
    line.receive_block(100, bytearray(4096))
    assert line.read() == "next"
    line, _ = make_line(b"go\nxxxxx", clock=clock)
    line.read()
    line.receive_block(3, bytearray(8))
    assert [line.read_byte(), line.read_byte()] == [b"x", b"x"]


def test_a_block_that_ends_early_is_an_error(clock: Clock) -> None:
    line, _ = make_line(b"x" * 10, clock=clock)
    with pytest.raises(ConnectionError, match="closed its connection"):
        line.receive_block(11, bytearray(64))


def test_a_neighbor_that_is_late_is_asked_again_until_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, failures = Wire(), [OSError("refused"), OSError("refused")]

    def create(place: tuple[str, int], timeout: float) -> Wire:
        assert place == ("host", 5)
        if failures:
            raise failures.pop()
        return wire

    monkeypatch.setattr(socket, "create_connection", create)
    line: Any = network.connect(("host", 5), b"hello")
    assert line.socket is wire
    assert wire.sent == b"hello\n"
    begun = clock.now
    failures.extend([OSError("refused")] * 10_000)
    with pytest.raises(OSError, match="refused"):
        network.connect(("host", 5), b"hello")
    assert network.CONNECT_SECONDS < clock.now - begun < network.CONNECT_SECONDS + 0.05


class Listener:
    def __init__(self, *wires: Wire) -> None:
        self._wires = deque(wires)

    def settimeout(self, seconds: float) -> None:
        assert network.CONNECT_SECONDS - 1 < seconds <= network.CONNECT_SECONDS

    def accept(self) -> tuple[Wire, None]:
        return self._wires.popleft(), None


def test_only_connections_with_the_secret_and_a_wanted_name_are_accepted() -> None:
    strangers = Wire([b"GET / HTTP/1.1\n"]), Wire([b"secret control 9\n"]), Wire([b"other data 1\n"]), Wire()
    good = Wire([b"secret data 1\n"]), Wire([b"secret control 2\n"])
    listener: Any = Listener(strangers[0], good[0], *strangers[1:], good[1])
    found: Any = network._accept(listener, b"secret", {"data 1", "control 2"})
    assert {name: line.socket for name, line in found.items()} == {"data 1": good[0], "control 2": good[1]}
    assert [wire.is_closed for wire in strangers] == [True] * 4
    assert [wire.is_closed for wire in good] == [False] * 2


# --- addresses and counters -----------------------------------------------------------------------------------------


class Values:
    """A store in a dictionary, which fails where others would wait."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, "") + value

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def get(self, key: str) -> bytes:
        if key not in self.values:
            raise TimeoutError(f"no {key}")
        return self.values[key].encode()


def test_the_last_rank_to_come_writes_down_all_addresses_by_number() -> None:
    store = Values()
    for rank, missing in ((10, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"), (2, "0, 1, 3, 4, 5, 6, 7, 8, 9")):
        with pytest.raises(TimeoutError, match=f"^rank {missing} sent no address: no network/before/all$"):
            exchange_addresses(store, rank, 11, "before", f"host-{rank} {rank} boot id")
    for rank in (0, 1, 3, 4, 5, 6, 7, 8):
        with pytest.raises(TimeoutError):
            exchange_addresses(store, rank, 11, "before", f"host-{rank} {rank} boot id")
    found = exchange_addresses(store, 9, 11, "before", "host-9 9 boot id")
    assert found == [[f"host-{rank}", str(rank), "boot id"] for rank in range(11)]
    assert exchange_addresses(store, 3, 11, "before", "again 3 x") == found
    assert set(store.values) == {"network/before/each", "network/before/count", "network/before/all"}


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "10.0.0.1"),
        ({"NCCL_SOCKET_IFNAME": "=eth2,eth1"}, "10.0.0.2"),
        ({"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth2"}, "10.0.0.1"),
        ({"GLOO_SOCKET_IFNAME": "none", "NCCL_SOCKET_IFNAME": "eth2"}, "10.0.0.2"),
        ({"GLOO_SOCKET_IFNAME": "none"}, "127.0.0.1"),
        ({}, "127.0.0.1"),
    ],
)
def test_the_interface_of_the_collectives_is_measured(
    variables: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {"eth1": "10.0.0.1", "eth2": "10.0.0.2"}

    def look(name: str) -> str:
        if name not in addresses:
            raise OSError(f"no {name}")
        return addresses[name]

    monkeypatch.setattr(network, "_interface_address", look)
    assert find_own_address(variables) == address
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1"), (3, "eth2")])
    assert network.find_interface("10.0.0.2") == "eth2"
    assert network.find_interface("10.0.0.3") is None


NET_DEV = """Inter-|   Receive                        |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    1       2    3    4    5     6          7         8     9      10   11   12   13    14      15         16
  eth0: 1001    1002 1003 1004 1005  1006       1007      1008  1009    1010 1011 1012 1013  1014    1015       1016
"""
SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin InSegs OutSegs RetransSegs InErrs
Tcp: 1 200 300 400 77 5
"""


def test_counters_are_those_of_the_kernels_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of /proc/net/dev: bytes, packets, errors, drops, ... received, then the same sent."""
    files = {"/proc/net/dev": NET_DEV, "/proc/net/snmp": SNMP}
    monkeypatch.setattr(network, "open", lambda path, **_: io.StringIO(files[path]), raising=False)
    assert read_counters("eth0") == {
        "interface": "eth0",
        "rx_bytes": 1001,
        "rx_packets": 1002,
        "rx_dropped": 1004,
        "tx_bytes": 1009,
        "tx_packets": 1010,
        "tx_dropped": 1012,
        "retransmits": 77,
    }
    assert read_counters(None) == {"interface": None, "retransmits": 77}
    files["/proc/net/dev"] = "eth0: 1 2\n"
    files["/proc/net/snmp"] = "Tcp: RetransSegs\nTcp: many\n"
    assert read_counters("eth0") == {"interface": "eth0"}


def test_processes_of_one_network_stack_have_one_identity() -> None:
    boot, _, stack = network._network_identity().partition("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert stack == str(Path("/proc/self/ns/net").stat().st_ino)


def test_a_machine_without_proc_has_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **_: object) -> object:
        raise FileNotFoundError(path)

    monkeypatch.setattr(network, "open", refuse, raising=False)
    assert read_counters("eth0") == {"interface": "eth0"}
    assert network._network_identity() == socket.gethostname()
    monkeypatch.setattr(network, "open", builtins.open, raising=False)


def test_longer_waiting_for_neighbors_lengthens_their_answers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_SECONDS", 10.0)
    monkeypatch.setattr(network, "STEP_SECONDS", 20.0)
    network.wait_for_neighbors(5.0)
    assert (network.CONNECT_SECONDS, network.STEP_SECONDS) == (5.0, 20.0)
    network.wait_for_neighbors(30.0)
    assert (network.CONNECT_SECONDS, network.STEP_SECONDS) == (30.0, 35.0)


# --- one rank -------------------------------------------------------------------------------------------------------


class Trip:
    """A connection to the right neighbor, which answers after given times."""

    def __init__(self, clock: Clock, seconds: Iterable[float], answer: bytes = b"x") -> None:
        self._clock, self._seconds, self._answer = clock, iter(seconds), answer
        self.socket = Wire()
        self.blocks: list[int] = []

    def send_block(self, size: int) -> None:
        self.blocks.append(size)

    def read_byte(self) -> bytes:
        self._clock.now += next(self._seconds)
        return self._answer


class Growth:
    """A connection whose blocks take a given time each, and whose answers are given."""

    def __init__(self, clock: Clock, seconds: float = 0.0, answers: Iterable[bytes] = ()) -> None:
        self._clock, self._seconds, self._answers = clock, seconds, iter(answers)
        self.socket = Wire()
        self.blocks: list[int] = []

    def send_block(self, size: int) -> None:
        self.blocks.append(size)

    def read_byte(self) -> bytes:
        return next(self._answers)

    def receive_block(self, size: int, buffer: bytearray) -> float:
        self.blocks.append(size)
        self._clock.now += self._seconds * size / FIRST_CHUNK
        return float(size)


def make_member(forward: Any, backward: Any = None, form: str = FULL) -> network._Member:
    silent: Any = Growth(Clock())
    return network._Member(0, 2, form, forward or silent, backward or silent, "127.0.0.1")


def test_round_trips_are_sorted_and_their_median_sets_the_length_of_a_transfer(clock: Clock) -> None:
    member = make_member(Trip(clock, [0.4, 0.1, 0.3, 0.2]))
    assert member.do("ping", 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert member._trip == pytest.approx(0.3)
    with pytest.raises(ConnectionError, match="closed"):
        make_member(Trip(clock, [0.1], b"")).do("ping", 1)


@pytest.mark.parametrize(
    ("answers", "sizes"), [([b"."], 1), ([b"+", b"+", b"."], 3), ([b"+"] * 9, 8), ([b"+", b""], 2)]
)
def test_blocks_grow_fourfold_until_the_receiver_has_enough(clock: Clock, answers: list[bytes], sizes: int) -> None:
    forward = Growth(clock, answers=answers)
    found = make_member(forward).do("grow", 0)
    assert forward.blocks == [FIRST_CHUNK * 4**number for number in range(sizes)]
    assert found == forward.blocks[-1] <= 4 * MAX_CHUNK


@pytest.mark.parametrize(
    ("form", "trip", "blocks"),
    [
        (SHORT, 0.0, 1),  # 0.005 seconds are enough
        (FULL, 0.0, 4),  # 0.005, 0.02, 0.08, 0.32 seconds
        (AFTER, 0.0, 4),
        (AFTER, 0.001, 4),
        (FULL, 0.03, 5),  # twelve round trips take 0.36 seconds
        (FULL, 0.026, 4),  # 0.312 seconds
        (FULL, 10.0, 6),  # at most two seconds
    ],
)
def test_a_transfer_lasts_for_some_round_trips_and_at_most_two_seconds(
    clock: Clock, form: str, trip: float, blocks: int
) -> None:
    backward = Growth(clock, seconds=0.005)
    member = make_member(None, backward, form)
    member._trip = trip
    sizes = [FIRST_CHUNK * 4**number for number in range(blocks)]
    assert member.do("sink", 0) == float(sizes[-1])
    assert backward.blocks == sizes
    assert backward.socket.sent == b"+" * (blocks - 1) + b"."


def test_two_seconds_are_enough_on_the_longest_way(clock: Clock) -> None:
    backward = Growth(clock, seconds=0.00244)  # the sixth block takes 2.5 seconds
    member = make_member(None, backward)
    member._trip = 1.0
    member.do("sink", 0)
    assert len(backward.blocks) == 6


def test_a_fast_link_gets_no_block_beyond_the_largest(clock: Clock) -> None:
    backward = Growth(clock)
    make_member(None, backward).do("sink", 0)
    assert backward.blocks[-2] < MAX_CHUNK <= backward.blocks[-1]


def test_a_rank_follows_orders_until_the_end(clock: Clock) -> None:
    control, wire = make_line(b"rest 0\nping 1\nend\nrest 0\n")
    make_member(Trip(clock, [0.5])).follow(control)
    assert wire.sent == b"null\n[0.5]\n"


def test_sending_and_receiving_at_once_reports_a_failure_of_either() -> None:
    def fail() -> None:
        raise ConnectionError("lost")

    assert network._beside(lambda: None, lambda: 3) == 3
    with pytest.raises(ConnectionError, match="lost"):
        network._beside(fail, lambda: 3)


# --- rank 0's part --------------------------------------------------------------------------------------------------


class Ranks:
    """All ranks of a probe, seen from rank 0: notes the orders, and answers them."""

    def __init__(self, size: int, rates: Sequence[float], first: Iterable[float] = (5.0,)) -> None:
        self.size, self.rates, self.first = size, rates, deque(first)
        self.orders: list[list[str]] = []
        self.followers = [Follower(self, rank) for rank in range(1, size)]

    def note(self, rank: int, order: str) -> Any:
        if rank == (1 if self.size > 1 else 0):
            self.orders.append(["?"] * self.size)
        if not self.orders or rank == 0:
            self.orders[-1][0] = order
        else:
            self.orders[-1][rank] = order
        word = order.split()[0]
        if word == "receive":
            return self.first.popleft() if len(self.first) > 1 else self.first[0]
        answers: Mapping[str, Any] = {
            "both": [0.1 * number + rank for number in range(20)],
            "grow": 1 << 21,
            "sink": 1000.0 + rank,
            "exchange": self.rates[rank],
            "counters": {"interface": f"eth{rank}"},
        }
        return answers.get(word)

    def do(self, word: str, number: int) -> Any:
        return self.note(0, f"{word} {number}")


class Follower:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank, self._answer = ranks, rank, ""
        self.is_ended = False

    def write(self, text: str) -> None:
        if text == "end":
            self.is_ended = True
        else:
            self._answer = json.dumps(self._ranks.note(self._rank, text))

    def read(self) -> str:
        return self._answer


def lead(ranks: Ranks, form: str, drain: float = 0.0) -> Any:
    found = network._lead(ranks, ranks.followers, ranks.size, form, drain)  # type: ignore[arg-type]
    assert all(follower.is_ended for follower in ranks.followers)
    return found


def test_the_full_form_measures_some_links_alone_all_together_and_a_burst(clock: Clock) -> None:
    ranks = Ranks(6, [10.0, 11.0, 12.0, 13.0, 14.0, 15.0], first=[9000.0, 2000.0, 3000.0, 4000.0])
    report = lead(ranks, FULL)
    assert report["ranks"] == 6
    assert [(link["from"], link["to"]) for link in report["links"]] == [
        *((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)),
    ]
    # The median and the 90th percentile of 20 times.
    assert [link["rtt_p50_seconds"] for link in report["links"]] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [link["rtt_p90_seconds"] for link in report["links"]] == pytest.approx([1.8, 2.8, 3.8, 4.8, 5.8, 6.8])
    # At most four of the links alone, spread over the ring; the receiver is the one that measures.
    alone = {link["from"]: link["alone_bits_per_second"] for link in report["links"] if "alone_bits_per_second" in link}
    assert alone == {0: 1001.0, 1: 1002.0, 3: 1004.0, 4: 1005.0}
    # Rank 1 receives what rank 0 sends.
    assert [link["together_bits_per_second"] for link in report["links"]] == [11.0, 12.0, 13.0, 14.0, 15.0, 10.0]
    assert report["links"][0]["first_bits_per_second"] == 2000.0  # the least of four trials
    assert report["links"][0]["first_bytes"] == BURST_BYTES == 2**20
    assert "first_bytes" not in report["links"][1]
    assert report["counters"] == [{"interface": f"eth{rank}"} for rank in range(6)]
    assert "drained_bytes" not in report
    rest = "rest 0"
    assert ranks.orders == [
        ["both 40"] * 6,
        ["grow 0", "sink 0", *[rest] * 4],
        [rest, "grow 0", "sink 0", *[rest] * 3],
        [*[rest] * 3, "grow 0", "sink 0", rest],
        [*[rest] * 4, "grow 0", "sink 0"],
        [f"exchange {1 << 21}"] * 6,
        *[[f"send {BURST_BYTES}", f"receive {BURST_BYTES}", *[f"rest {BURST_BYTES}"] * 4]] * 4,
        ["counters 0"] * 6,
    ]
    assert clock.now - 100.0 == pytest.approx(4 * 0.25)


def test_the_short_form_measures_round_trips_and_one_link() -> None:
    ranks = Ranks(3, [1.0, 2.0, 3.0])
    report = lead(ranks, SHORT)
    assert [order[0] for order in ranks.orders] == ["both 20", "grow 0", "counters 0"]
    assert set(report["links"][0]) == {"from", "to", "rtt_p50_seconds", "rtt_p90_seconds", "alone_bits_per_second"}
    assert "alone_bits_per_second" not in report["links"][1]


def test_after_the_task_counters_come_first_and_no_burst_is_looked_for() -> None:
    ranks = Ranks(3, [1.0, 2.0, 3.0])
    report = lead(ranks, AFTER)
    assert [order[0] for order in ranks.orders] == ["counters 0", "both 20", "grow 0", f"exchange {1 << 21}"]
    assert [link["together_bits_per_second"] for link in report["links"]] == [2.0, 3.0, 1.0]
    assert "first_bits_per_second" not in report["links"][0]
    assert len(report["counters"]) == 3


def test_a_report_has_at_most_64_links() -> None:
    report = lead(Ranks(65, [1.0] * 65), SHORT)
    assert (report["ranks"], len(report["links"]), len(report["counters"])) == (65, 64, 64)


def test_token_buckets_are_emptied_before_anything_is_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_drain", lambda rate, exchange: (int(rate), max(exchange(7))))
    ranks = Ranks(2, [3.0, 8.0], first=[1.0])
    report = lead(ranks, FULL, drain=5e6)
    assert ranks.orders[0] == ["exchange 7"] * 2
    assert (report["drained_bytes"], report["drained_bits_per_second"]) == (5_000_000, 8.0)
    assert clock.now - 100.0 == 1.0  # a first rate below the steady one ends the trials


@pytest.mark.parametrize(
    ("values", "least", "taken"),
    [([5.0, 1.0], 5.0, 1), ([5.1, 4.0, 1.0], 4.0, 2), ([9.0, 8.0, 7.0, 6.0, 1.0], 6.0, 4), ([9.0, 9.5, 5.0], 5.0, 3)],
)
def test_trials_of_a_burst_end_at_a_rate_that_is_none(values: list[float], least: float, taken: int) -> None:
    left = deque(values)
    assert network._find_least(left.popleft, 5.0) == least
    assert len(values) - len(left) == taken


def make_link(clock: Clock, rates: Callable[[int], float]) -> tuple[Callable[[int], list[float]], list[int]]:
    """An exchange whose rate depends on the bytes sent before it."""
    chunks: list[int] = []

    def exchange(chunk: int) -> list[float]:
        rate = rates(sum(chunks))
        chunks.append(chunk)
        clock.now += 8 * chunk / rate
        return [rate / 2, rate]

    return exchange, chunks


def test_a_link_at_its_rate_is_watched_for_a_second(clock: Clock) -> None:
    """Chunks of a quarter of a second at 8 Mbit/s."""
    exchange, chunks = make_link(clock, lambda sent: 8e6)
    assert network._drain(8e6, exchange) == (1_000_000, 8e6)
    assert chunks == [250_000] * 4


@pytest.mark.parametrize(("factor", "is_limited"), [(1.09, True), (1.11, False)])
def test_a_tenth_above_the_rate_is_the_rate(clock: Clock, factor: float, is_limited: bool) -> None:
    exchange, _ = make_link(clock, lambda sent: factor * 8e6)
    sent, last = network._drain(8e6, exchange)
    assert last == pytest.approx(factor * 8e6)
    assert (sent < 2_000_000) is is_limited
    assert (clock.now - 100.0 > network.MAX_DRAIN_SECONDS) is not is_limited


def test_a_full_bucket_is_emptied_in_longer_chunks(clock: Clock) -> None:
    """Ten times the rate for the first 5 MB, then the rate: the second that is watched begins there."""
    exchange, chunks = make_link(clock, lambda sent: 8e7 if sent < 5_000_000 else 8e6)
    sent, last = network._drain(8e6, exchange)
    assert chunks[0] == 250_000
    assert chunks[1] == 2_500_000
    assert last == 8e6
    assert sent == sum(chunks)
    assert sum(chunk for chunk, before in zip(chunks, [0, *chunks], strict=False) if before) > 5_000_000


def test_a_link_that_is_never_limited_gets_the_largest_bucket_and_its_refill(clock: Clock) -> None:
    exchange, chunks = make_link(clock, lambda sent: 8e9)
    sent, _ = network._drain(8e7, exchange)
    assert max(chunks) == MAX_DRAIN_CHUNK
    assert DRAIN_BYTES == 600 * 2**20  # more than the 512 MiB of containerd's plugin
    assert DRAIN_BYTES <= sent <= DRAIN_BYTES + 1e7 * (clock.now - 100.0) + 2 * MAX_DRAIN_CHUNK
    assert sum(chunks[:-1]) < DRAIN_BYTES + 1e7 * (clock.now - 100.0)


@pytest.mark.parametrize(("rate", "chunk"), [(8e4, 100_000), (8e5, FIRST_CHUNK), (8e6, 250_000), (8e10, 64 << 20)])
def test_the_first_chunk_lasts_for_a_quarter_of_a_second_within_limits(clock: Clock, rate: float, chunk: int) -> None:
    exchange, chunks = make_link(clock, lambda sent: rate)
    network._drain(rate, exchange)
    assert chunks[0] == chunk


# --- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identities", "stage", "form"),
    [
        (["a", "a", "a"], "before", "short"),
        (["a", "a", "a"], "after", "short"),
        (["a", "b", "a"], "before", "full"),
        (["a", "b", "a"], "after", "after"),
    ],
)
def test_ranks_on_one_network_take_the_short_form(
    identities: list[str], stage: str, form: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def measure(rank: int, places: Any, listener: Any, token: bytes, form: str, drain: float) -> Any:
        asked.append((rank, places, token, form, drain))
        clock.now += 2.5
        return {"ranks": 3}

    rows = [[f"host-{identity}", str(number), identity] for number, identity in enumerate(identities)]
    monkeypatch.setattr(network, "exchange_addresses", lambda *_: rows)
    monkeypatch.setattr(network, "_measure", measure)
    store = Values()
    report = measure_network(store, 0, 3, stage, drain=7.0)
    assert report == {"stage": stage, "form": form, "networks": len(set(identities)), "ranks": 3, "seconds": 2.5}
    token = store.values[f"network/{stage}/token"].encode()
    assert len(token) == 32
    assert asked == [(0, [(f"host-{one}", number) for number, one in enumerate(identities)], token, form, 7.0)]


class SharedValues(Values):
    """The same for threads, which wait for what others set."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            super().set(key, value)
            self._changed.notify_all()

    def append(self, key: str, value: str) -> None:
        with self._changed:
            super().append(key, value)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            return super().add(key, amount)

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 30)
            return super().get(key)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_are_threads_measure_each_other(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    store, reports = SharedValues(), [None] * size  # type: tuple[SharedValues, list[Any]]

    def run(rank: int) -> None:
        reports[rank] = measure_network(store, rank, size, "before", "127.0.0.1")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    report = reports[0]
    assert reports[1:] == [None] * (size - 1)
    assert "error" not in report, report["error"]
    assert (report["form"], report["networks"], report["ranks"]) == ("short", 1, size)
    assert [(link["from"], link["to"]) for link in report["links"]] == [(r, (r + 1) % size) for r in range(size)]
    assert all(0 < link["rtt_p50_seconds"] <= link["rtt_p90_seconds"] < 30 for link in report["links"])
    assert [row["interface"] for row in report["counters"]] == [network.find_interface("127.0.0.1")] * size
    assert all("retransmits" in row for row in report["counters"])


def test_a_neighbor_that_fails_fails_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 leaves after its address is known, so that rank 0 waits for its connections in vain."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.05)
    store = SharedValues()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store.append("network/before/each", f"1 127.0.0.1 {port} other\n")
        store.add("network/before/count", 1)
        report = measure_network(store, 0, 2, "before", "127.0.0.1")
    assert report is not None
    assert report["error"] == "timed out"
    assert 0 < report["seconds"] < 10


def test_a_failure_is_a_report_of_rank_0_in_one_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        clock.now += 1.5
        raise OSError("no route\n  to host" + 300 * "!")

    monkeypatch.setattr(network, "find_own_address", fail)
    report = measure_network(Values(), 0, 2, "before")
    assert report == {"stage": "before", "error": ("no route to host" + 300 * "!")[:200], "seconds": 1.5}
    assert measure_network(Values(), 1, 2, "before") is None


# --- the probe as a program -----------------------------------------------------------------------------------------


def test_a_store_of_rank_0_keeps_appends_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = network_probe.SocketStore(0, 1, "127.0.0.1", 0)
    store.set("a", "1")
    store.append("a", "2")
    store.append("b", "x")
    assert (store.get("a"), store.get("b")) == (b"12", b"x")
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.get("n") == b"5"
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match=r"no rank sent c within 0\.01 s"):
        store.get("c")


def test_a_failed_probe_between_pods_is_an_event_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def fail(host: str, seconds: float) -> str:
        raise OSError("Name or service\nnot known")

    monkeypatch.setattr(network, "CONNECT_SECONDS", network.CONNECT_SECONDS)
    monkeypatch.setattr(network, "STEP_SECONDS", network.STEP_SECONDS)
    monkeypatch.setattr(network_probe, "_resolve", fail)
    monkeypatch.setattr(contract, "emit", lambda *words, **fields: events.append((words, fields)))
    for rank in (0, 1):
        assert network_probe.main([str(rank), "2", "before", "host:1", "3", "0"]) == 0
    assert events == [(("network", 0), {"stage": "before", "error": "Name or service not known"})]
    assert network.CONNECT_SECONDS == 3.0


def test_the_program_prints_the_report_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(*words: object) -> Any:
        asked.append(words)
        return None if words[1] else {"stage": "before"}

    monkeypatch.setattr(network_probe, "SocketStore", lambda *words: words)
    monkeypatch.setattr(network_probe, "measure_network", measure)
    assert network_probe.main(["0", "2", "before", "::1:77"]) == 0
    assert capsys.readouterr().out == '{"stage": "before"}\n'
    assert network_probe.main(["1", "2", "before", "host:77"]) == 0
    assert capsys.readouterr().out == ""
    assert asked == [
        ((0, 2, "::1", 77), 0, 2, "before", "::1"),
        ((1, 2, "host", 77), 1, 2, "before", "host"),
    ]
