"""How the process that makes a network configures it: which commands, with which numbers; none of them is run."""

import ctypes
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import machine
from mlbench_cli.agent.network import hub, namespaces
from mlbench_cli.agent.network.namespaces import NEW_NETWORK, ShapingError
from mlbench_cli.agent.network.switch import (
    CREDIT_SECONDS,
    LATE_SECONDS,
    LEAD_SECONDS,
    MAX_HELD_BYTES,
    Packet,
    PacketSwitch,
    Scheduler,
)
from tests.fakes.clock import Clock

OWN = 10  # the descriptor of the hub's network; those of the workers follow


class Kernel:
    """In place of the kernel and iproute2: notes what is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[tuple[str, list[str], list[int]]] = []
        self.entered: list[tuple[int, int]] = []
        self.sysctls: list[tuple[str, str]] = []
        self.offloads: list[str] = []
        self.is_root, self.has_netem = True, True
        self.networks = iter(range(OWN, 100))
        self.refuses: Callable[[str], bool] = lambda line: False
        self.became: list[str] = []
        monkeypatch.setattr(namespaces, "find_tool", lambda name: f"/sbin/{name}")
        monkeypatch.setattr(namespaces, "configure", self.configure)
        monkeypatch.setattr(namespaces, "new_network", lambda: next(self.networks))
        monkeypatch.setattr(namespaces, "become_root_of_user_namespace", lambda: self.became.append("root"))
        monkeypatch.setattr(namespaces, "open_user", lambda: 7)
        monkeypatch.setattr(namespaces, "enter", lambda descriptor, kind: self.entered.append((descriptor, kind)))
        monkeypatch.setattr(namespaces, "set_sysctl", self.set_sysctl)
        monkeypatch.setattr(namespaces, "disable_offloads", lambda interface: self.offloads.append(interface))
        monkeypatch.setattr(hub, "_dump_qdisc", lambda interface: f"of {interface}")
        monkeypatch.setattr(os, "geteuid", lambda: 0 if self.is_root else 1000)

    def configure(self, lines: list[str], tool: str = "ip", descriptors: Any = ()) -> None:
        if any(self.refuses(line) for line in lines) or (not self.has_netem and "dev lo root" in lines[0]):
            raise ShapingError("it is refused")
        self.commands.append((tool, list(lines), list(descriptors)))

    def set_sysctl(self, name: str, value: str) -> str:
        self.sysctls.append((name, value))
        return value

    def lines(self, tool: str) -> list[str]:
        return [line for used, lines, _ in self.commands for line in lines if used == tool]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


# --- with netem -----------------------------------------------------------------------------------------------------


def test_each_worker_has_a_link_to_a_bridge_and_knows_its_neighbors(kernel: Kernel) -> None:
    made = hub._Hub(3, 1e8, 0.02)
    assert kernel.commands[0] == ("ip", ["link set lo up"], [])
    assert kernel.commands[2] == (
        "ip",
        [
            "link set lo up",
            "link add eth0 address 02:4d:4c:42:00:01 type veth peer name h0 netns /proc/self/fd/10",
            "link set eth0 mtu 1500 txqueuelen 2000 up",
            "addr add 10.77.0.1/24 dev eth0",
            "neigh add 10.77.0.2 lladdr 02:4d:4c:42:00:02 dev eth0",
            "neigh add 10.77.0.3 lladdr 02:4d:4c:42:00:03 dev eth0",
        ],
        [OWN],
    )
    assert "neigh add 10.77.0.2 lladdr 02:4d:4c:42:00:02 dev eth0" not in kernel.commands[4][1]
    assert kernel.lines("ip")[-5:] == [
        "link add hub type bridge",
        "link set hub mtu 1500 up",
        "link set h0 mtu 1500 master hub up",
        "link set h1 mtu 1500 master hub up",
        "link set h2 mtu 1500 master hub up",
    ]
    assert (made.networks, made.user, kernel.became) == ([11, 12, 13], -1, [])
    assert kernel.entered == [(OWN, NEW_NETWORK)] * 3  # back from each worker's


def test_links_have_rate_and_delay_toward_the_hub_and_the_rate_toward_workers(kernel: Kernel) -> None:
    """At 100 Mbit/s and 20 ms, 250 kB are on their way: four times that in packets of 1500 bytes, and 1000 more."""
    hub._Hub(2, 1e8, 0.02)
    worker = "qdisc replace dev eth0 root netem rate 100000000bit delay 20000us limit 1666"
    assert kernel.lines("tc") == [
        "qdisc replace dev lo root netem delay 0us",
        worker,
        worker,
        "qdisc replace dev h0 root netem rate 100000000bit limit 10000",
        "qdisc replace dev h1 root netem rate 100000000bit limit 10000",
    ]


def test_how_the_network_was_made_is_told(kernel: Kernel) -> None:
    assert hub._Hub(2, 1e8, 0.02).setup == {
        "method": "netem",
        "kernel": platform.release(),
        "user_namespace": False,
        "mtu": 1500,
        "sysctls": {
            "tcp_congestion_control": "cubic",
            "tcp_slow_start_after_idle": "0",
            "tcp_no_metrics_save": "1",
            "tcp_rmem": "4096 131072 6291456",
            "tcp_wmem": "4096 65536 6291456",
        },
        "qdiscs": ["of eth0", "of eth0", "of h0", "of h1"],
    }
    assert [value for name, value in kernel.sysctls if name == "tcp_congestion_control"] == ["reno", "cubic"] * 2


@pytest.mark.parametrize(
    ("rate", "delay", "mtu", "limit", "buffer"),
    [
        (1e8, 0.0, 1500, 1000, 6 << 20),
        (1e9, 0.02, 9000, 2111, 20_000_000),  # 2.5 MB on their way; buffers hold eight times that
        (1e10, 0.1, 9000, 56_555, 1_000_000_000),
    ],
)
def test_buffers_hold_what_is_on_its_way(
    kernel: Kernel, rate: float, delay: float, mtu: int, limit: int, buffer: int
) -> None:
    made = hub._Hub(1, rate, delay)
    assert kernel.lines("tc")[1].endswith(f" limit {limit}")
    assert made.setup["mtu"] == mtu
    assert made.setup["sysctls"]["tcp_rmem"] == f"4096 131072 {buffer}"


def test_an_ordinary_user_makes_a_user_namespace_first(kernel: Kernel) -> None:
    kernel.is_root = False
    made = hub._Hub(1, 1e8, 0.0)
    assert (kernel.became, made.user, made.setup["user_namespace"]) == (["root"], 7, True)


# --- without netem --------------------------------------------------------------------------------------------------


def test_without_netem_packets_go_through_the_switch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.has_netem = False
    opened: list[Any] = []

    def open_link(name: str) -> Any:
        opened.append(name)
        return SimpleNamespace(fileno=lambda: len(opened))

    monkeypatch.setattr(hub, "open_link", open_link)
    made = hub._Hub(2, 1e8, 0.02)
    assert (made.setup["method"], made.setup["mtu"], made.setup["qdiscs"]) == ("packet", 8333, [])
    assert (kernel.offloads, opened) == (["eth0", "eth0"], ["h0", "h1"])
    assert kernel.lines("ip")[-2:] == [
        "link set h0 mtu 8333 txqueuelen 2000 up",
        "link set h1 mtu 8333 txqueuelen 2000 up",
    ]
    assert kernel.lines("tc") == []


@pytest.mark.parametrize(
    ("rate", "method", "mtu"),
    [
        (1e9, "netem", 9000),
        (0.999e9, "netem", 1500),
        (1e6, "packet", 1500),
        (1.8e7, "packet", 1500),
        (1.2e8, "packet", 10_000),
        (1e10, "packet", 65_535),
    ],
)
def test_packets_are_as_large_as_what_moves_them_pays_for(rate: float, method: str, mtu: int) -> None:
    assert hub.choose_mtu(rate, method) == mtu


# --- orders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(5)
    yield own, theirs
    own.close()
    theirs.close()


def serve(made: Any, channel: tuple[socket.socket, socket.socket], *messages: bytes) -> list[Any]:
    """The answers to these messages, before the agent goes away."""
    own, theirs = channel
    for message in messages:
        theirs.send(message)
    theirs.shutdown(socket.SHUT_WR)
    made.serve(own)
    return [json.loads(theirs.recv(4096)) for _ in messages]


@pytest.mark.parametrize(
    ("rate", "loss", "kept"),
    [
        (1e7, 0.0, "netem rate 10000000bit limit 10000"),
        (1e7, 0.025, "netem rate 10000000bit limit 10000 loss 2.5%"),
        (0.0, 0.0, "netem rate 8bit limit 10000 loss 100%"),
        (0.0, 0.5, "netem rate 8bit limit 10000 loss 100%"),
    ],
)
def test_a_link_is_changed_in_both_directions(
    kernel: Kernel, channel: tuple[socket.socket, socket.socket], rate: float, loss: float, kept: str
) -> None:
    made = hub._Hub(2, 1e8, 0.02)
    kernel.commands.clear()
    kernel.entered.clear()
    order = json.dumps({"link": 1, "rate": rate, "loss": loss}).encode()
    assert serve(made, channel, order, b"count") == [{"problem": None}, {"switch": None, "sent_bytes": []}]
    assert kernel.lines("tc") == [
        f"qdisc replace dev h1 root {kept}",
        f"qdisc replace dev eth0 root {kept} delay 20000us",
    ]
    assert kernel.entered == [(12, NEW_NETWORK), (OWN, NEW_NETWORK)]


def test_a_link_that_cannot_be_changed_is_told_and_the_hub_is_where_it_was(
    kernel: Kernel, channel: tuple[socket.socket, socket.socket]
) -> None:
    made = hub._Hub(2, 1e8, 0.02)
    kernel.entered.clear()
    kernel.refuses = lambda line: "dev eth0" in line
    order = json.dumps({"link": 0, "rate": 0.0, "loss": 0.0}).encode()
    assert serve(made, channel, order) == [{"problem": "it is refused"}]
    assert kernel.entered == [(11, NEW_NETWORK), (OWN, NEW_NETWORK)]


def test_the_switch_runs_with_exact_timers_and_counts_for_whoever_asks(
    kernel: Kernel, channel: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PR_SET_TIMERSLACK of linux/prctl.h: the kernel may wake a process 50 µs late otherwise."""
    asked: list[Any] = []
    changed: list[Any] = []

    def run(control: int, answer: Callable[[], bool]) -> None:
        asked.append(control)
        while answer():
            pass

    monkeypatch.setattr(machine, "prctl", lambda *words: asked.append(words))
    made = hub._Hub(1, 1e8, 0.02)
    switch: Any = SimpleNamespace(run=run, totals=lambda: {"packets": 3}, sent_bytes=[7])
    switch.change_link = lambda *words: changed.append(words)
    made._switch = switch
    order = json.dumps({"link": 0, "rate": 1e6, "loss": 0.5}).encode()
    assert serve(made, channel, b"count", order) == [
        {"switch": {"packets": 3}, "sent_bytes": [7]},
        {"problem": None},
    ]
    assert asked == [(29, 1), channel[0].fileno()]
    assert changed == [(0, 1e6, 0.5)]


def test_disciplines_are_shown_as_tc_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(words: list[str], **more: Any) -> Any:
        asked.append(words)
        return SimpleNamespace(stdout="qdisc netem 8001: root\n")

    monkeypatch.setattr(namespaces, "find_tool", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    assert hub._dump_qdisc("h0") == "qdisc netem 8001: root"
    assert asked == [["/sbin/tc", "qdisc", "show", "dev", "h0"]]


# --- the process ----------------------------------------------------------------------------------------------------


class Started:
    """A hub that serves nobody."""

    refuses = False

    def __init__(self, workers: int, rate: float, delay: float) -> None:
        if self.refuses:
            raise ShapingError("no right to do so")
        self.words = (workers, rate, delay)
        self.user, self.networks = -1, [0, 1]
        self.setup = {"method": "netem"}

    def serve(self, channel: socket.socket) -> None:
        """The agent has gone already."""


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process asks of the system, which it does not get."""
    asked: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda number, what: asked.append((number, what)))
    monkeypatch.setattr(machine, "prctl", lambda option, value: asked.append((option, value)))
    monkeypatch.setattr(hub, "_Hub", Started)
    return asked


def test_a_hub_hands_over_descriptors_and_dies_with_its_agent(
    quiet: list[Any], channel: tuple[socket.socket, socket.socket]
) -> None:
    own, theirs = channel
    assert hub.main([str(os.dup(own.fileno())), "2", "1e8", "0.02"]) == 0
    message, descriptors, _, _ = socket.recv_fds(theirs, 4096, 10)
    for descriptor in descriptors:
        os.close(descriptor)
    assert (json.loads(message), len(descriptors)) == ({"method": "netem"}, 3)  # the first stands for the user's
    assert quiet == [
        (signal.SIGINT, signal.SIG_IGN),
        (signal.SIGTERM, signal.SIG_IGN),
        (machine.PR_SET_PDEATHSIG, signal.SIGKILL),
    ]


def test_a_hub_that_makes_no_network_says_why(
    quiet: list[Any], channel: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Started, "refuses", True)
    own, theirs = channel
    assert hub.main([str(os.dup(own.fileno())), "2", "1e8", "0.02"]) == 1
    assert json.loads(theirs.recv(4096)) == {"problem": "no right to do so"}


def test_a_hub_whose_agent_has_died_meanwhile_ends(
    quiet: list[Any], channel: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = iter([4711, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    own, theirs = channel
    assert hub.main([str(os.dup(own.fileno())), "2", "1e8", "0.02"]) == 1
    own.close()
    assert theirs.recv(4096) == b""


# --- system calls ---------------------------------------------------------------------------------------------------


def test_lines_are_handed_to_the_tool_as_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    done = SimpleNamespace(returncode=0, stderr="")

    def run(words: list[str], **more: Any) -> Any:
        asked.append((words, more["input"], list(more["pass_fds"])))
        return done

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/sbin/{name}")
    namespaces.configure(["link set lo up", "link set eth0 up"], descriptors=[7])
    namespaces.configure(["qdisc show"], "tc")
    assert asked == [
        (["/sbin/ip", "-batch", "-"], "link set lo up\nlink set eth0 up\n", [7]),
        (["/sbin/tc", "-batch", "-"], "qdisc show\n", []),
    ]
    done.returncode, done.stderr = 1, f"Error:\n  {'x' * 300}\n"
    with pytest.raises(ShapingError) as caught:
        namespaces.configure(["qdisc show"], "tc")
    assert str(caught.value) == f"tc refuses to configure the network: Error: {'x' * 193}"


def test_tools_of_root_are_found_although_users_have_them_not_on_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str | None] = []

    def which(name: str, path: str | None = None) -> str | None:
        places.append(path)
        return "/sbin/tc" if path and "/sbin" in path.split(":") and name == "tc" else None

    monkeypatch.setattr(shutil, "which", which)
    assert namespaces.find_tool("tc") == "/sbin/tc"
    assert places[0] is None
    with pytest.raises(ShapingError, match=r'^the command "ip" is missing \(package iproute2\)$'):
        namespaces.find_tool("ip")


class Libc:
    """System calls that succeed or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, number: int = 1) -> None:
        self.calls: list[Any] = []
        self.code = code
        monkeypatch.setattr(namespaces, "_libc", lambda: self)
        monkeypatch.setattr(ctypes, "get_errno", lambda: number)

    def unshare(self, flags: int) -> int:
        self.calls.append(flags)
        return self.code

    def setns(self, descriptor: int, kind: int) -> int:
        self.calls.append((descriptor, kind))
        return self.code


def test_system_calls_use_the_kernels_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLONE_NEWUSER and CLONE_NEWNET of sched.h."""
    libc = Libc(monkeypatch, 0)
    monkeypatch.setattr(namespaces, "open_network", lambda: 5)
    assert namespaces.new_network() == 5
    namespaces.enter(6, namespaces.NEW_USER)
    assert libc.calls == [0x40000000, (6, 0x10000000)]


def test_system_calls_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Libc(monkeypatch, -1)
    with pytest.raises(ShapingError, match=r"^a network namespace cannot be created: Operation not permitted$"):
        namespaces.new_network()
    with pytest.raises(PermissionError, match="setns: Operation not permitted"):
        namespaces.enter(6, NEW_NETWORK)
    with pytest.raises(PermissionError, match="unshare: Operation not permitted"):
        namespaces.become_user_again(1000, 100)


class Kept(io.StringIO):
    """A file whose content outlives it."""

    def __init__(self, path: str, files: dict[str, str]) -> None:
        super().__init__()
        self._path, self._files = path, files

    def close(self) -> None:
        if not self.closed:
            self._files[self._path] = self.getvalue()
        super().close()


def test_a_user_becomes_root_inside_and_the_user_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of user_namespaces(7): inside, outside, how many."""
    files: dict[str, str] = {}
    Libc(monkeypatch, 0)
    monkeypatch.setattr(namespaces, "open", lambda path, *_, **__: Kept(path, files), raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    namespaces.become_root_of_user_namespace()
    assert files == {
        "/proc/self/setgroups": "deny",
        "/proc/self/uid_map": "0 1000 1",
        "/proc/self/gid_map": "0 100 1",
    }
    namespaces.become_user_again(1000, 100)
    assert (files["/proc/self/uid_map"], files["/proc/self/gid_map"]) == ("1000 0 1", "100 0 1")


def test_a_system_that_lets_no_user_make_networks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    Libc(monkeypatch, 0)
    monkeypatch.setattr(namespaces, "open", refuse, raising=False)
    with pytest.raises(ShapingError, match="does not let an ordinary user create networks: Operation not permitted"):
        namespaces.become_root_of_user_namespace()
    assert namespaces.set_sysctl("tcp_rmem", "1") is None


# --- the switch -----------------------------------------------------------------------------------------------------


class Switch:
    """A switch of three links at 100 Mbit/s and 10 ms, at a time that the test says."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
        self.own, self.ends = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for end in (*self.own, *self.ends):
            end.setblocking(False)
        self.switch = PacketSwitch(self.own, 1e8, 0.01)

    def send(self, source: int, target: int, length: int = 1000) -> None:
        frame = bytes([2, 0x4D, 0x4C, 0x42, 0, target + 1]) + bytes(8 + length)
        self.ends[source].send(frame)
        self.switch._take(self.own[source].fileno())

    def deliver(self, seconds: float) -> list[int]:
        """Let so many seconds pass; how many packets each worker has got."""
        self.clock.now += seconds
        self.switch._deliver()
        return [self._read(end) for end in self.ends]

    def _read(self, end: socket.socket) -> int:
        count = 0
        while True:
            try:
                end.recv(70_000)
            except BlockingIOError:
                return count
            count += 1


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    clock = Clock(100.0)
    monkeypatch.setattr("mlbench_cli.agent.network.switch.time", clock)
    made = Switch(clock)
    yield made
    for end in (*made.own, *made.ends):
        end.close()


def test_a_packet_arrives_when_its_time_has_come_or_a_moment_before(switch: Switch) -> None:
    """1000 bytes take 80 µs at 100 Mbit/s, less the credit of a millisecond, and 10 ms."""
    switch.send(0, 2)
    due = 1000 * 8 / 1e8 - CREDIT_SECONDS + 0.01
    assert switch.deliver(due - LEAD_SECONDS - 1e-6) == [0, 0, 0]
    assert switch.deliver(2e-6) == [0, 0, 1]
    counted = switch.switch.counters
    assert (counted.packets, counted.bytes, counted.dropped_packets, counted.late_packets) == (1, 1000, 0, 0)
    assert switch.switch.sent_bytes == [1000, 0, 0]


@pytest.mark.parametrize("target", [1, -1, 3, 200])
def test_packets_to_nobody_or_to_oneself_do_not_count(switch: Switch, target: int) -> None:
    switch.send(1, target)
    assert switch.deliver(1.0) == [0, 0, 0]
    assert (switch.switch.counters.packets, switch.switch.sent_bytes) == (0, [0, 0, 0])


@pytest.mark.parametrize(("extra", "late"), [(-1e-5, 0), (1e-5, 1)])
def test_a_packet_is_late_beyond_what_the_credit_makes_up_for(switch: Switch, extra: float, late: int) -> None:
    switch.send(0, 2)
    due = 1000 * 8 / 1e8 - CREDIT_SECONDS + 0.01
    switch.deliver(due + LATE_SECONDS + CREDIT_SECONDS + extra)
    counted = switch.switch.totals()
    assert counted["late_packets"] == late
    assert counted["worst_late_seconds"] == pytest.approx(late * 0.00151, abs=1e-6)


def test_the_worst_lateness_stays(switch: Switch) -> None:
    for seconds in (0.05, 0.5, 0.1):
        switch.send(0, 2)
        switch.deliver(seconds)
    assert switch.switch.counters.late_packets == 3
    assert switch.switch.counters.worst_late_seconds == pytest.approx(0.5 - 0.01 - 0.00008 + CREDIT_SECONDS, abs=1e-5)


def test_what_nobody_takes_is_dropped(switch: Switch) -> None:
    switch.send(0, 2)
    switch.ends[2].close()
    switch.clock.now += 1.0
    switch.switch._deliver()
    assert (switch.switch.counters.packets, switch.switch.counters.dropped_packets) == (1, 1)


def test_a_switch_that_holds_too_much_drops_what_comes(switch: Switch) -> None:
    switch.switch._held = MAX_HELD_BYTES
    switch.send(0, 2)
    switch.send(0, 2)
    assert switch.switch.counters.dropped_packets == 1
    assert switch.deliver(1.0) == [0, 0, 1]
    assert switch.switch._held == MAX_HELD_BYTES


@pytest.mark.parametrize(("source", "target", "lost"), [(0, 1, 1), (1, 0, 1), (1, 2, 0)])
def test_a_link_that_is_down_is_down_in_both_directions(switch: Switch, source: int, target: int, lost: int) -> None:
    switch.switch.change_link(0, 0.0, 0.0)
    switch.send(source, target)
    assert switch.switch.counters.dropped_packets == lost
    switch.switch.change_link(0, 1e8, 0.0)
    switch.send(source, target)
    assert switch.switch.counters.dropped_packets == lost


def test_a_share_of_packets_is_lost_whichever_link_loses_them(switch: Switch) -> None:
    drawn = iter([0.019, 0.02, 0.5, 0.0])
    switch.switch._random = SimpleNamespace(random=lambda: next(drawn))  # type: ignore[assignment]
    switch.switch.change_link(1, 1e8, 0.02)
    assert [switch.switch._is_lost(0, 1) for _ in range(2)] == [True, False]
    assert [switch.switch._is_lost(1, 2) for _ in range(2)] == [False, True]
    assert switch.switch._is_lost(0, 2) is False  # nothing is drawn


@pytest.mark.parametrize(("length", "waits"), [(319, False), (320, True)])
def test_only_small_packets_pass_the_data_of_other_flows(length: int, waits: bool) -> None:
    scheduler = Scheduler(2, 1e8, 0.0, credit=0.0)
    scheduler.admit(0.0, Packet(0, 1, b"data", 1_000_000))
    scheduler.admit(0.0, Packet(0, 1, b"ack", length))
    first = next(scheduler.take_arrived(1e9))[1]
    assert (first.flow == b"data") is waits
