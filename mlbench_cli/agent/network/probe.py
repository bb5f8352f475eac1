"""Measures the network between the nodes of a run: round trips, goodput, bursts and counters. Standard library only.

Neighbors in the ring of nodes measure each other over separate TCP connections: n sends to n + 1. Nodes with one
network stack (on one machine) use the short form, about 20 ms; otherwise it takes up to 2 s. If the measurement fails,
this is reported, and the run continues.

Where the network is emulated, this is a program, started in the network of each worker:
`main([NODE, STAGE, TOKEN, HOST:PORT, ...])` with the places of all. Node 0 prints the report.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple, TypeVar

from mlbench_cli.agent.interfaces import find_interface

_T = TypeVar("_T")

BEFORE, AFTER = "before", "after"  # the task
FULL, SHORT = "full", "short"

CONNECT_SECONDS = 10.0
STEP_SECONDS = 20.0  # timeout for a neighbor's answer, on the slowest link
TRANSFER_SECONDS = {FULL: 0.25, SHORT: 0.004, AFTER: 0.1}  # minimum duration of a reliable transfer
# TCP needs some round trips to reach a link's rate: a shorter transfer would measure slow start.
TRANSFER_TRIPS, MAX_TRIPS_SECONDS = 12, 2.0
PINGS = {FULL: 40, SHORT: 20, AFTER: 20}
PAUSE_SECONDS = 0.25  # for a token bucket to fill
BURST_TRIALS = 4  # at most; a slow reader causes a burst once, a token bucket after each pause
BURST_EXCESS, BURST_BYTES = 1.05, 1 << 20  # a rate up to this multiple of the steady rate is no burst
FIRST_CHUNK, MAX_CHUNK = 1 << 17, 1 << 30
MAX_ALONE, MAX_LINKS = 4, 64  # most links measured alone, one after the other; most links in a report
GROWTH = 4
_BLOCK = memoryview(bytes(1 << 18))
_WARM_UP = 0.2  # share of a transfer that is not timed: TCP slow start


class Meeting(NamedTuple):
    """Where nodes listen, in order; the token that all of them know, to reject connections of other programs; and the
    number of network stacks that they have."""

    listener: socket.socket
    places: Sequence[tuple[str, int]]
    token: str
    networks: int


def measure_network(node: int, stage: str, meeting: Meeting) -> dict[str, Any]:
    """Measure the links among all nodes; all must call it, and it closes the listener. Returns the report; only that of
    node 0 has the links, from each node to its right neighbor."""
    begun = time.monotonic()
    form = SHORT if meeting.networks == 1 else FULL if stage == BEFORE else AFTER
    report = {"stage": stage, "form": form, "networks": meeting.networks}
    try:
        with meeting.listener as listener:
            report |= _measure(node, meeting.places, listener, meeting.token.encode(), form) or {}
    except (OSError, RuntimeError, ValueError) as error:
        report = _explain(stage, error)
    return {**report, "seconds": round(time.monotonic() - begun, 6)}


def _explain(stage: str, error: Exception) -> dict[str, Any]:
    return {"stage": stage, "error": " ".join(str(error).split())[:200]}


def read_counters(interface: str | None) -> dict[str, Any]:
    """Bytes, packets and drops of one interface, and TCP's retransmissions in this network namespace, so far."""
    found: dict[str, Any] = {"interface": interface}
    with suppress(OSError, ValueError, IndexError), open("/proc/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name.strip() == interface:
                fields = [int(word) for word in rest.split()]
                found["rx_bytes"], found["rx_packets"], found["rx_dropped"] = fields[0], fields[1], fields[3]
                found["tx_bytes"], found["tx_packets"], found["tx_dropped"] = fields[8], fields[9], fields[11]
    with suppress(OSError, ValueError), open("/proc/net/snmp", encoding="ascii") as file:
        rows = [line.split() for line in file if line.startswith("Tcp:")]
        found["retransmits"] = int(rows[1][rows[0].index("RetransSegs")])
    return found


def stack_identity() -> str:
    """An identifier that is equal for processes with the same network stack."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


# --- connections ----------------------------------------------------------------------------------------------------


class Line:
    """A connection for lines of text and blocks of bytes. All operations have timeouts."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(STEP_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._rest = b""

    def write(self, text: str) -> None:
        """Send one line."""
        self.socket.sendall(text.encode() + b"\n")

    def read(self) -> str:
        """Receive one line. Raises ConnectionError if the other side has closed, ValueError above 4 MiB."""
        while b"\n" not in self._rest:
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("a neighbor closed its connection")
            self._rest += data
            if len(self._rest) > 1 << 22:
                raise ValueError("a neighbor sent an endless line")
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")

    def read_byte(self) -> bytes:
        """Receive one byte, which may have arrived with the last line; b"" if the other side has closed."""
        if not self._rest:
            return self.socket.recv(1)
        byte, self._rest = self._rest[:1], self._rest[1:]
        return byte

    def send_block(self, size: int) -> None:
        """Send `size` meaningless bytes."""
        while size > 0:
            size -= self.socket.send(_BLOCK[: min(size, len(_BLOCK))])

    def receive_block(self, size: int, buffer: bytearray) -> float:
        """Receive a block of `size` bytes; returns bits per second, without its first part (TCP slow start)."""
        got = min(size, len(self._rest))
        self._rest = self._rest[got:]
        untimed = max(got, int(_WARM_UP * size))
        self._receive(untimed - got, buffer)
        begun = time.perf_counter()
        self._receive(size - untimed, buffer)
        elapsed = time.perf_counter() - begun
        return (size - untimed) * 8 / elapsed if elapsed > 0 else 0.0

    def _receive(self, size: int, buffer: bytearray) -> None:
        while size > 0:
            count = self.socket.recv_into(buffer, min(len(buffer), size))
            if not count:
                raise ConnectionError("a neighbor closed its connection")
            size -= count

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def connect(place: tuple[str, int], hello: bytes) -> Line:
    """Connect to a neighbor, retrying for CONNECT_SECONDS, and send `hello`. Raises OSError after that."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            line = Line(socket.create_connection(place, timeout=CONNECT_SECONDS))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    line.socket.sendall(hello + b"\n")
    return line


def accept(listener: socket.socket, token: bytes, wanted: set[str]) -> dict[str, Line]:
    """Accept the connections that send the token and one of the `wanted` words, and return them by word."""
    found: dict[str, Line] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    while wanted - found.keys():
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        line = Line(listener.accept()[0])
        with suppress(OSError, ValueError):
            secret, _, name = line.read().partition(" ")
            if secrets.compare_digest(secret.encode(), token) and name in wanted:
                found[name] = line
                continue
        line.close()
    return found


# --- the measurement --------------------------------------------------------------------------------------------------


def _measure(
    node: int, places: Sequence[tuple[str, int]], listener: socket.socket, token: bytes, form: str
) -> dict[str, Any] | None:
    size = len(places)
    right, left = (node + 1) % size, (node - 1) % size
    wanted = {f"data {left}"} | ({f"control {other}" for other in range(1, size)} if node == 0 else set())
    with ExitStack() as stack:
        # A connection is made when the other side listens, before it accepts.
        forward = stack.enter_context(closing(connect(places[right], token + f" data {node}".encode())))
        control = None
        if node:
            control = stack.enter_context(closing(connect(places[0], token + f" control {node}".encode())))
        accepted = accept(listener, token, wanted)
        for line in accepted.values():
            stack.enter_context(closing(line))
        member = _Member(form, forward, accepted[f"data {left}"], places[node][0])
        if control is not None:
            member.follow(control)
            return None
        return _lead(member, [accepted[f"control {other}"] for other in range(1, size)], size, form)


class _Member:
    """One node of the probe: executes node 0's orders one by one."""

    def __init__(self, form: str, forward: Line, backward: Line, address: str) -> None:
        self._form, self._forward, self._backward = form, forward, backward
        self._interface = find_interface(address)
        self._buffer = bytearray(1 << 18)
        self._trip = 0.0  # round-trip time to the right neighbor in seconds
        self._orders: dict[str, Callable[[int], Any]] = {
            "ping": lambda count: _beside(lambda: self._echo(count), lambda: self._ping(count)),
            "grow": self._grow,
            "sink": self._sink,
            "send": self._forward.send_block,
            "receive": lambda size: self._backward.receive_block(size, self._buffer),
            "exchange": self._exchange,
            "counters": lambda _: read_counters(self._interface),
            "rest": lambda _: None,
        }

    def follow(self, control: Line) -> None:
        while (order := control.read()) != "end":
            word, _, number = order.partition(" ")
            control.write(json.dumps(self.do(word, int(number))))

    def do(self, word: str, number: int) -> Any:
        return self._orders[word](number)

    def _ping(self, count: int) -> list[float]:
        """Round-trip times to the right neighbor in seconds, sorted."""
        times = []
        for _ in range(count):
            begun = time.perf_counter()
            self._forward.socket.sendall(b"x")
            if not self._forward.read_byte():
                raise ConnectionError("a neighbor closed its connection")
            times.append(time.perf_counter() - begun)
        self._trip = sorted(times)[count // 2]
        return sorted(times)

    def _echo(self, count: int) -> None:
        for _ in range(count):
            self._backward.socket.sendall(self._backward.read_byte())

    def _grow(self, _: int) -> int:
        """Send larger and larger blocks until one is long enough for the receiver; returns its size in bytes."""
        size = FIRST_CHUNK
        while True:
            self._forward.send_block(size)
            if self._forward.read_byte() != b"+" or size >= MAX_CHUNK:
                return size
            size *= GROWTH

    def _sink(self, _: int) -> float:
        """Receive what `_grow` sends; returns bits per second of the last block."""
        size = FIRST_CHUNK
        enough = max(TRANSFER_SECONDS[self._form], min(MAX_TRIPS_SECONDS, TRANSFER_TRIPS * self._trip))
        while True:
            begun = time.perf_counter()
            rate = self._backward.receive_block(size, self._buffer)
            is_last = time.perf_counter() - begun >= enough or size >= MAX_CHUNK
            self._backward.socket.sendall(b"." if is_last else b"+")
            if is_last:
                return rate
            size *= GROWTH

    def _exchange(self, size: int) -> float:
        """Send to the right neighbor while receiving from the left one; returns bits per second received."""
        return _beside(lambda: self._forward.send_block(size), lambda: self._backward.receive_block(size, self._buffer))


def _beside(aside: Callable[[], Any], main: Callable[[], _T]) -> _T:
    """Run `aside` in a thread while `main` runs, and return the result of `main`. The thread keeps no process alive."""
    problems: list[Exception] = []

    def work() -> None:
        try:
            aside()
        except (OSError, ValueError) as error:
            problems.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    result = main()
    thread.join()
    if problems:
        raise problems[0]
    return result


def _lead(member: _Member, followers: Sequence[Line], size: int, form: str) -> dict[str, Any]:
    """Node 0's part: order one step after the other, and collect the results."""

    def order(words: Mapping[int, str], number: int, others: str = "rest") -> list[Any]:
        """Send each node its order (`others` if it has none), and return the answers by node."""
        for node, line in enumerate(followers, 1):
            line.write(f"{words.get(node, others)} {number}")
        own = member.do(words.get(0, others), number)
        return [own, *(json.loads(line.read()) for line in followers)]

    def measure_first() -> float:
        """Bits per second of the first bytes after a pause."""
        time.sleep(PAUSE_SECONDS)
        return float(order({0: "send", 1: "receive"}, min(block, BURST_BYTES))[1])

    # The task's share is counted from the end of the probe before it to the start of the one after it.
    counters = order({}, 0, "counters") if form == AFTER else []
    links: list[dict[str, Any]] = [{"from": node, "to": (node + 1) % size} for node in range(size)]
    # Python 3.9 has no strict=.
    for link, times in zip(links, order({}, PINGS[form], "ping")):  # noqa: B905
        link["rtt_p50_seconds"] = times[len(times) // 2]
        link["rtt_p90_seconds"] = times[int(0.9 * len(times))]
    alone = sorted({number * size // min(size, MAX_ALONE) for number in range(min(size, MAX_ALONE))})
    block = FIRST_CHUNK
    for sender in alone if form == FULL else alone[:1]:
        receiver = (sender + 1) % size
        answers = order({sender: "grow", receiver: "sink"}, 0)
        block = answers[sender]
        links[sender]["alone_bits_per_second"] = answers[receiver]
    if form != SHORT:
        for link, rate in zip(links, _shift(order({}, block, "exchange"))):  # noqa: B905
            link["together_bits_per_second"] = rate
    if form == FULL:
        links[0]["first_bytes"] = min(block, BURST_BYTES)
        links[0]["first_bits_per_second"] = find_least(measure_first, BURST_EXCESS * links[0]["alone_bits_per_second"])
    counters = counters or order({}, 0, "counters")
    for line in followers:
        line.write("end")
    return {"nodes": size, "links": links[:MAX_LINKS], "counters": counters[:MAX_LINKS]}


def find_least(measure: Callable[[], float], enough: float) -> float:
    """The minimum of up to BURST_TRIALS measurements; stops early at one that is at most `enough`."""
    least, left = measure(), BURST_TRIALS - 1
    while least > enough and left:
        least, left = min(least, measure()), left - 1
    return least


def _shift(values: Sequence[Any]) -> list[Any]:
    """Reorder values from by-receiver to by-sender."""
    return [*values[1:], values[0]]


def main(arguments: Sequence[str]) -> int:
    """NODE STAGE TOKEN HOST:PORT ...; node 0 prints the report."""
    node, stage, token, *places = int(arguments[0]), *arguments[1:]
    hosts = [(host, int(port)) for host, _, port in (place.rpartition(":") for place in places)]
    try:
        listener = socket.create_server(hosts[node], backlog=len(hosts) + 8)
    except OSError as error:
        report = _explain(stage, error)
    else:
        report = measure_network(node, stage, Meeting(listener, hosts, token, len({host for host, _ in hosts})))
    if node == 0:
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
