"""The process that makes a run's network and, without netem in the kernel, is its switch.

`main([DESCRIPTOR, WORKERS, RATE, DELAY])` makes the namespaces, sends their descriptors and one JSON document
over the socket DESCRIPTOR, and then answers each message there with its counters until the other end is closed. A
message that is JSON, {"link": WORKER, "rate": RATE, "loss": SHARE}, changes a link instead. It dies with the agent that
started it, and all namespaces with it.

    agent - user namespace (ordinary users only) - hub namespace: h0 h1 ... and a bridge or the switch
                                                 - one namespace per worker: eth0 10.77.0.N, lo
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import TypedDict

from mlbench_cli.agent import machine
from mlbench_cli.agent.network import namespaces
from mlbench_cli.agent.network.namespaces import ShapingError
from mlbench_cli.agent.network.switch import PacketSwitch, open_link
from mlbench_cli.model.network import worker_address

MIN_MTU, MAX_MTU, MAX_KERNEL_MTU = 1500, 65_535, 9000
PACKETS_PER_SECOND = 1500  # of each link at its full rate: what a switch in Python can move
MIN_BUFFER_BYTES = 6 << 20
NETEM, PACKET = "netem", "packet"
_TIMER_SLACK = 29  # PR_SET_TIMERSLACK


class SetupDocument(TypedDict):
    """How the network was made; a part of shaping.json."""

    method: str
    kernel: str
    user_namespace: bool
    mtu: int
    sysctls: dict[str, str | None]
    qdiscs: list[str]


def choose_mtu(rate: float, method: str) -> int:
    """The MTU in bytes for `rate` (bits per second). The Python switch is limited by packets, so it gets large ones on
    fast links; on a slow link a large packet would take too long."""
    if method == NETEM:
        return MAX_KERNEL_MTU if rate >= 1e9 else MIN_MTU
    return int(min(MAX_MTU, max(MIN_MTU, rate / 8 / PACKETS_PER_SECOND)))


def main(arguments: Sequence[str]) -> int:
    """Make the network, send its descriptors to the agent, and carry packets until the agent has gone.

    Exit code 1, with the problem as a message, if the network cannot be made.
    """
    channel = socket.socket(fileno=int(arguments[0]))
    workers, rate, delay = int(arguments[1]), float(arguments[2]), float(arguments[3])
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the agent ends it, after the ranks
    try:
        hub = _Hub(workers, rate, delay)
    except (ShapingError, OSError) as error:
        channel.send(json.dumps({"problem": str(error)}).encode())
        return 1
    # Only now, since a new user namespace clears it.
    machine.prctl(machine.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    descriptors = [hub.user if hub.user >= 0 else hub.networks[0], *hub.networks]
    socket.send_fds(channel, [json.dumps(hub.setup).encode()], descriptors)
    hub.serve(channel)
    return 0


class _Hub:
    """The namespaces of all workers and what joins them."""

    def __init__(self, workers: int, rate: float, delay: float) -> None:
        namespaces.find_tool("ip")
        self.user = -1
        if os.geteuid() != 0:
            namespaces.become_root_of_user_namespace()
            self.user = namespaces.open_user()
        self._own = namespaces.new_network()
        self._delay = delay
        namespaces.configure(["link set lo up"])
        method = NETEM if has_netem() else PACKET
        mtu = choose_mtu(rate, method)
        self.networks: list[int] = []
        self.setup: SetupDocument = {
            "method": method,
            "kernel": platform.release(),
            "user_namespace": self.user >= 0,
            "mtu": mtu,
            "sysctls": {},
            "qdiscs": [],
        }
        for worker in range(workers):
            self._make_worker(worker, workers, rate, delay, mtu)
        self._switch = self._join(workers, rate, delay, mtu)

    def _make_worker(self, worker: int, workers: int, rate: float, delay: float, mtu: int) -> None:
        network = namespaces.new_network()
        self.networks.append(network)
        neighbors = [
            f"neigh add {worker_address(other)} lladdr {_mac(other)} dev eth0"
            for other in range(workers)
            if other != worker
        ]
        namespaces.configure(
            [
                "link set lo up",
                f"link add eth0 address {_mac(worker)} type veth peer name h{worker} netns /proc/self/fd/{self._own}",
                f"link set eth0 mtu {mtu} txqueuelen 2000 up",
                f"addr add {worker_address(worker)}/24 dev eth0",
                *neighbors,
            ],
            descriptors=[self._own],
        )
        if self.setup["method"] == PACKET:
            namespaces.disable_offloads("eth0")
        buffer = max(MIN_BUFFER_BYTES, int(8 * rate / 8 * delay))
        self.setup["sysctls"] = {
            name: namespaces.set_sysctl(name, value)
            for name, value in (
                ("tcp_congestion_control", "reno"),  # if the system keeps cubic to its administrator
                ("tcp_congestion_control", "cubic"),
                ("tcp_slow_start_after_idle", "0"),
                ("tcp_no_metrics_save", "1"),
                ("tcp_rmem", f"4096 131072 {buffer}"),
                ("tcp_wmem", f"4096 65536 {buffer}"),
            )
        }
        if self.setup["method"] == NETEM:
            limit = max(1000, int(4 * rate / 8 * delay / mtu) + 1000)
            _shape("eth0", f"netem rate {rate:.0f}bit delay {delay * 1e6:.0f}us limit {limit}")
            self.setup["qdiscs"].append(_dump_qdisc("eth0"))
        namespaces.enter(self._own, namespaces.NEW_NETWORK)

    def _join(self, workers: int, rate: float, delay: float, mtu: int) -> PacketSwitch | None:
        """Join the workers' links: with a bridge, or with the switch."""
        names = [f"h{worker}" for worker in range(workers)]
        if self.setup["method"] == PACKET:
            namespaces.configure([f"link set {name} mtu {mtu} txqueuelen 2000 up" for name in names])
            return PacketSwitch([open_link(name) for name in names], rate, delay)
        namespaces.configure(
            [
                "link add hub type bridge",
                f"link set hub mtu {mtu} up",
                *(f"link set {name} mtu {mtu} master hub up" for name in names),
            ]
        )
        for name in names:  # toward the worker: the rate again, so that several senders share the link
            _shape(name, f"netem rate {rate:.0f}bit limit 10000")
            self.setup["qdiscs"].append(_dump_qdisc(name))
        return None

    def serve(self, channel: socket.socket) -> None:
        """Answer messages with the counters until the other end is closed; move packets in between."""

        def answer() -> bool:
            message = channel.recv(1 << 10)
            if message.startswith(b"{"):
                channel.send(json.dumps({"problem": self._change_link(**json.loads(message))}).encode())
            elif message:
                channel.send(json.dumps(self._count()).encode())
            return bool(message)

        if self._switch is not None:
            machine.prctl(_TIMER_SLACK, 1)
            self._switch.run(channel.fileno(), answer)
        else:
            while answer():
                pass

    def _change_link(self, link: int, rate: float, loss: float) -> str | None:
        """Change rate (bits per second; 0: the link is down) and loss (share of packets) of a worker's link, in both
        directions."""
        if self._switch is not None:
            self._switch.change_link(link, rate, loss)
            return None
        lost = f" loss {100 * loss:g}%" if loss else ""
        kept = f"netem rate {rate or 8:.0f}bit limit 10000{lost if rate else ' loss 100%'}"
        try:
            _shape(f"h{link}", kept)
            namespaces.enter(self.networks[link], namespaces.NEW_NETWORK)
            try:
                _shape("eth0", f"{kept} delay {self._delay * 1e6:.0f}us")
            finally:
                namespaces.enter(self._own, namespaces.NEW_NETWORK)
        except (ShapingError, OSError) as error:
            return str(error)
        return None

    def _count(self) -> dict[str, object]:
        if self._switch is None:
            return {"switch": None, "sent_bytes": []}
        return {"switch": self._switch.totals(), "sent_bytes": self._switch.sent_bytes}


def has_netem() -> bool:
    """Whether the kernel can delay packets itself. Leaves nothing behind but a rule on this namespace's loopback."""
    try:
        _shape("lo", "netem delay 0us")
    except ShapingError:
        return False
    return True


def _shape(interface: str, discipline: str) -> None:
    namespaces.configure([f"qdisc replace dev {interface} root {discipline}"], "tc")


def _dump_qdisc(interface: str) -> str:
    words = [namespaces.find_tool("tc"), "qdisc", "show", "dev", interface]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _mac(worker: int) -> str:
    return f"02:4d:4c:42:00:{worker + 1:02x}"
