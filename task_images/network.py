"""Measures the network between the ranks: round trips, goodput, bursts and counters. Standard library only.

Neighbors in the ring of ranks measure each other over separate TCP connections: r sends to r + 1. Ranks on one network
interface (processes of one machine) use the short form, about 20 ms; otherwise it takes up to 2 s. If the measurement
fails, this is reported, and the run continues.

`python -m task_images.network_probe` is the same probe as a program, for engines.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypedDict, TypeVar

_T = TypeVar("_T")

FULL, SHORT, AFTER = "full", "short", "after"

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
_SOCKET_FAMILY = socket.AF_INET
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


LinkReport = TypedDict(  # functional form, because "from" is a keyword; from r to its right neighbor
    "LinkReport",
    {
        "from": int,
        "to": int,
        "rtt_p50_seconds": float,
        "rtt_p90_seconds": float,
        "alone_bits_per_second": float,  # while no other link was used; for at most MAX_ALONE links
        "together_bits_per_second": float,  # while all ranks sent
        "first_bits_per_second": float,  # of the first bytes after a pause
        "first_bytes": int,
    },
    total=False,
)


class CounterReport(TypedDict, total=False):
    """Kernel counters of a rank's interface since it was created, and of TCP in its network namespace."""

    interface: str | None
    rx_bytes: int
    rx_packets: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_dropped: int
    retransmits: int


class NetworkReport(TypedDict, total=False):
    """Rank 0's report of a probe, with `error` instead of figures if it failed."""

    stage: str
    form: str
    ranks: int
    networks: int  # network stacks of the ranks
    links: list[LinkReport]
    counters: list[CounterReport]
    seconds: float
    error: str


class Store(Protocol):
    """A key-value store shared by the ranks, such as torch's rendezvous store."""

    def set(self, key: str, value: str) -> Any:
        """Set the value of a key, for all ranks."""

    def append(self, key: str, value: str) -> None:
        """Append to the value of a key."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, initially 0, and return the sum."""
        ...

    def get(self, key: str) -> bytes:
        """Wait for the key, and return its value."""
        ...


def measure_network(store: Store, rank: int, size: int, stage: str, master: str = "") -> NetworkReport | None:
    """Measure the links among all ranks; all must call it. Returns the report on rank 0, None on the others.

    stage    before or after: the report's name, and a part of the keys in the store
    master   address of rank 0, whose route determines this rank's interface if no variable names it

    Times are in seconds, rates in bits per second; counters are those of this rank's interface since it was created.
    """
    begun = time.monotonic()
    try:
        address = find_own_address(os.environ, master)
        listener = socket.create_server((address, 0), family=_SOCKET_FAMILY, backlog=size + 8)
        with listener:
            # A secret of this probe, to reject connections of other programs.
            if rank == 0:
                store.set(f"network/{stage}/token", secrets.token_hex(16))
            token = store.get(f"network/{stage}/token")
            own = f"{address} {listener.getsockname()[1]} {_network_identity()}"
            everyone = exchange_addresses(store, rank, size, stage, own)
            places = [(host, int(port)) for host, port, _ in everyone]
            networks = len({identity for _, _, identity in everyone})
            form = SHORT if networks == 1 else FULL if stage == "before" else AFTER
            links = _measure(rank, places, listener, token, form)
    except (OSError, RuntimeError, ValueError) as error:
        if rank:
            return None
        return {"stage": stage, "error": " ".join(str(error).split())[:200], "seconds": time.monotonic() - begun}
    if links is None:
        return None
    return {"stage": stage, "form": form, "networks": networks, **links, "seconds": time.monotonic() - begun}


def exchange_addresses(store: Store, rank: int, size: int, stage: str, own: str) -> list[list[str]]:
    """Exchange three words per rank, and return those of all ranks, by rank.

    At most four requests per rank for any number of ranks; reading all keys would take a million for 1,024 ranks.
    """
    store.append(f"network/{stage}/each", f"{rank} {own}\n")
    try:
        if store.add(f"network/{stage}/count", 1) == size:
            each = store.get(f"network/{stage}/each").decode()
            store.set(f"network/{stage}/all", each)
        else:
            each = store.get(f"network/{stage}/all").decode()
    except (OSError, RuntimeError) as error:
        here = {int(line.partition(" ")[0]) for line in store.get(f"network/{stage}/each").decode().splitlines()}
        missing = ", ".join(str(other) for other in range(size) if other not in here)
        raise TimeoutError(f"rank {missing} sent no address: {error}") from None
    return [line.split(" ", 3)[1:] for line in sorted(each.splitlines(), key=lambda line: int(line.partition(" ")[0]))]


def find_own_address(environ: Mapping[str, str], master: str = "") -> str:
    """The IPv4 address at which other ranks reach this one. Raises OSError if there is none."""
    for variable in _INTERFACE_VARIABLES:
        name = environ.get(variable, "").lstrip("=").partition(",")[0]
        with suppress(OSError, ImportError):
            if name:
                return _interface_address(name)
    with socket.socket(_SOCKET_FAMILY, socket.SOCK_DGRAM) as probe:
        probe.connect((master or "127.0.0.1", 9))  # sends nothing; the kernel only selects a route
        return str(probe.getsockname()[0])


def find_interface(address: str) -> str | None:
    """The name of the interface with this address."""
    for _, name in socket.if_nameindex():
        with suppress(OSError, ImportError):
            if _interface_address(name) == address:
                return name
    return None


def read_counters(interface: str | None) -> CounterReport:
    """Bytes, packets and drops of one interface, and TCP's retransmissions in this network namespace, so far."""
    found: CounterReport = {"interface": interface}
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


def _interface_address(name: str) -> str:
    import fcntl

    with socket.socket(_SOCKET_FAMILY, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _network_identity() -> str:
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


def _accept(listener: socket.socket, token: bytes, wanted: set[str]) -> dict[str, Line]:
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
    rank: int, places: Sequence[tuple[str, int]], listener: socket.socket, token: bytes, form: str
) -> NetworkReport | None:
    size = len(places)
    right, left = (rank + 1) % size, (rank - 1) % size
    wanted = {f"data {left}"} | ({f"control {other}" for other in range(1, size)} if rank == 0 else set())
    lines: list[Line] = []
    try:
        accepted: dict[str, Line] = {}
        failure: list[BaseException] = []

        def accept() -> None:
            try:
                accepted.update(_accept(listener, token, wanted))
            except (OSError, ValueError) as error:
                failure.append(error)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        forward = connect(places[right], token + f" data {rank}".encode())
        lines.append(forward)
        control = None
        if rank:
            control = connect(places[0], token + f" control {rank}".encode())
            lines.append(control)
        thread.join()
        lines += accepted.values()
        if failure:
            raise failure[0]
        followers = [accepted[f"control {other}"] for other in range(1, size)] if rank == 0 else []
        member = _Member(rank, size, form, forward, accepted[f"data {left}"], places[rank][0])
        if control is not None:
            member.follow(control)
            return None
        return _lead(member, followers, size, form)
    finally:
        for line in lines:
            line.close()


class _Member:
    """One rank of the probe: executes rank 0's orders one by one."""

    def __init__(self, rank: int, size: int, form: str, forward: Line, backward: Line, address: str) -> None:
        self.rank, self.size, self.form = rank, size, form
        self._forward, self._backward = forward, backward
        self._interface = find_interface(address)
        self._buffer = bytearray(1 << 18)
        self._trip = 0.0  # round-trip time to the right neighbor in seconds
        self._orders: dict[str, Callable[[int], Any]] = {
            "ping": self._ping,
            "echo": self._echo,
            "both": self._ping_and_echo,
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

    def _ping_and_echo(self, count: int) -> list[float]:
        return _beside(lambda: self._echo(count), lambda: self._ping(count))

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
        enough = max(TRANSFER_SECONDS[self.form], min(MAX_TRIPS_SECONDS, TRANSFER_TRIPS * self._trip))
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
    """Run `aside` in a thread while `main` runs, and return the result of `main`."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            aside()
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    result = main()
    thread.join()
    if failure:
        raise failure[0]
    return result


def _lead(member: _Member, followers: Sequence[Line], size: int, form: str) -> NetworkReport:
    """Rank 0's part: order one step after the other, and collect the results."""

    def order(words: Mapping[int, str], number: int, others: str = "rest") -> list[Any]:
        """Send each rank its order (`others` if it has none), and return the answers by rank."""
        for rank, line in enumerate(followers, 1):
            line.write(f"{words.get(rank, others)} {number}")
        own = member.do(words.get(0, others), number)
        return [own, *(json.loads(line.read()) for line in followers)]

    def measure_first() -> float:
        """Bits per second of the first bytes after a pause."""
        time.sleep(PAUSE_SECONDS)
        return float(order({0: "send", 1: "receive"}, min(block, BURST_BYTES))[1])

    # The task's share is counted from the end of the probe before it to the start of the one after it.
    counters = order({}, 0, "counters") if form == AFTER else []
    links: list[LinkReport] = [{"from": rank, "to": (rank + 1) % size} for rank in range(size)]
    for link, times in zip(links, order({}, PINGS[form], "both"), strict=True):
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
        for link, rate in zip(links, _shift(order({}, block, "exchange")), strict=True):
            link["together_bits_per_second"] = rate
    if form == FULL:
        links[0]["first_bytes"] = min(block, BURST_BYTES)
        links[0]["first_bits_per_second"] = _find_least(measure_first, BURST_EXCESS * links[0]["alone_bits_per_second"])
    counters = counters or order({}, 0, "counters")
    for line in followers:
        line.write("end")
    return {"ranks": size, "links": links[:MAX_LINKS], "counters": counters[:MAX_LINKS]}


def _find_least(measure: Callable[[], float], enough: float) -> float:
    """The minimum of up to BURST_TRIALS measurements; stops early at one that is at most `enough`."""
    least, left = measure(), BURST_TRIALS - 1
    while least > enough and left:
        least, left = min(least, measure()), left - 1
    return least


def _shift(values: Sequence[Any]) -> list[Any]:
    """Reorder values from by-receiver to by-sender."""
    return [*values[1:], values[0]]
