"""The agent of one machine of several: that of local runs, which also talks to those on the other machines.

It is started on each machine of a run as `main([RUN/nodes/K])`: by srun, or through ssh in a separate session.
RUN/plan.json says what to do. Node 0 writes RUN/rendezvous.json; the others connect to it, and when all are there, they
measure the network between them and start their ranks. From then on the end of any of them ends the run everywhere.
Standard library only.

    RUN/plan.json  cancel  stacks  rendezvous.json  nodes/K/      what the run's client and node 0 write
    RUN/nodes/K/logs/  output/  resources.jsonl                  as in the folder of a local run
    RUN/nodes/K/.state/state.json  beat  archive.tar  results.json
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import selectors
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

from mlbench_cli.agent import courier, load, machine, rendezvous
from mlbench_cli.agent.agent import GRACE, STALL_SECONDS, Agent, Rank
from mlbench_cli.agent.clock import ClockWatch
from mlbench_cli.agent.head import SPARE_FILES, shares_folder
from mlbench_cli.agent.interfaces import find_interface, list_addresses, listen
from mlbench_cli.agent.link import HEAD, connect, ends_of, is_token, read_note
from mlbench_cli.agent.lock import MachineLock, describe_holder
from mlbench_cli.agent.messages import NOT_INSTALLED, SCHEMA_VERSION, STARTED, Cause
from mlbench_cli.agent.network import probe
from mlbench_cli.agent.processes import end_overdue, kill_processes, last_line
from mlbench_cli.agent.rendezvous import RankLink
from mlbench_cli.agent.wire import carry_out
from mlbench_cli.util.files import allow_open_files, let_read, replace_file, touch, write_atomically

BEAT_SECONDS = 5.0
BUSY_SECONDS = 10.0  # for which a run that is just ending may keep a machine; then it is busy
CONNECT_SECONDS = 0.02  # between two looks for node 0
LOOK_SECONDS = 1.0  # between two looks for RUN/cancel and RUN/stacks
LINGER_SECONDS = 120.0  # time for the other nodes to end after node 0
SOON = 1.0  # within which a node need not give a sign of life
INSTALL_SECONDS = 900.0
# Installs those of the packages of which this Python has no version into a folder.
_INSTALL = """import importlib.metadata, os, re, sys
def lacks(requirement):
    try:
        importlib.metadata.version(re.match(r"[A-Za-z0-9._-]+", requirement)[0])
    except importlib.metadata.PackageNotFoundError:
        return True
missing = [requirement for requirement in sys.argv[2:] if lacks(requirement)]
if missing:
    options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--target", sys.argv[1]]
    os.execv(sys.executable, [sys.executable, "-I", "-m", "pip", "install", *options, *missing])
"""
EXIT_REFUSED = 75
BLOCK = 1 << 20
LISTED = 5  # files that could not be packed
MAX_FOLDER_BYTES = 1024  # of a path: systems have limits for whole paths, and Python for the depth of calls
SLURM_FACTS = (
    *("SLURM_JOB_ID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_JOB_NODELIST", "SLURM_TOPOLOGY_ADDR"),
    *("SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_CPUS_ON_NODE", "SLURM_JOB_PARTITION", "SLURM_RESTART_COUNT"),
)


def main(arguments: list[str]) -> int:
    """Supervise the ranks of one node to their end; the argument is the node's folder, RUN/nodes/K.

    Exit code EXIT_REFUSED if this node of the run has been started before.
    """
    place = os.path.abspath(arguments[0])
    folder, node = os.path.dirname(os.path.dirname(place)), int(os.path.basename(place))
    machine.keep_only()
    with open(f"{folder}/plan.json", encoding="utf-8") as file:
        plan = json.load(file)
    os.makedirs(f"{place}/.state", mode=0o700, exist_ok=True)
    try:
        os.close(os.open(f"{place}/{STARTED}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:  # a batch job that was started again, or a second submission
        with open(f"{folder}/refused", "a", encoding="utf-8") as file:
            file.write(f"node {node} job {os.environ.get('SLURM_JOB_ID')} at {time.time():.0f}\n")
        return EXIT_REFUSED
    os.makedirs(f"{place}/logs", exist_ok=True)
    for entry in plan["nodes"][node]["ranks"]:
        os.makedirs(os.path.join(place, entry["environment"]["MLBENCH_OUTPUT_DIR"]), exist_ok=True)
    note = read_note(folder, HEAD)
    if note is None or shares_folder(folder, note):
        return NodeAgent(place, folder, node, plan).conduct()
    ranks = [entry["rank"] for entry in plan["nodes"][node]["ranks"]]

    def work() -> int:
        return NodeAgent(place, folder, node, plan).conduct()

    return courier.main(place, node, ranks, note, work, hold=plan["hold_seconds"], echo=plan["echo"])


class NodeAgent(Agent):
    """The agent of one node, which shares the fate of the run's other nodes."""

    def __init__(self, place: str, folder: str, node: int, plan: Mapping[str, Any]) -> None:
        own = plan["nodes"][node]
        self.run_folder, self.node, self.count = folder, node, len(plan["nodes"])
        self.run_status = os.stat(folder)
        request = {
            "run_id": plan["name"],
            "python": plan["python"] or sys.executable,
            "installed_code_only": plan["installed_code_only"],
            "finalizer": None,
            "finalizer_path": [],
            "machine_lock": {"lock": "unavailable", "lock_reason": None},
            "plan": {**plan, "ranks": own["ranks"]},
        }
        super().__init__(place, request)
        # Unless the cluster has a Python that was named when it was attached.
        self.takes_users_path = not plan["python"]
        self.is_over = False  # node 0 has ended, for nodes that only wait for it
        nodes = list(enumerate(plan["nodes"]))
        self.node_of_rank: dict[int, int] = {rank["rank"]: number for number, entry in nodes for rank in entry["ranks"]}
        self.node_of_worker: dict[int, int] = {worker: number for number, entry in nodes for worker in entry["workers"]}
        self.name = own["name"] or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.links: list[RankLink] = []
        self.hosts: list[str] | None = None
        self.server: socket.socket | None = None
        self.probe_listener: socket.socket | None = None  # where neighbors measure the network
        self.meeting: probe.Meeting | None = None  # None: the network is not measured
        self.next_beat = self.next_look = self.next_connection = 0.0
        self.last_turn = time.monotonic()
        self.stacks_asked: bytes | None = None  # what RUN/stacks said when stacks were last printed
        self.lock = MachineLock(plan["lock"], plan["name"], plan["timeout"])
        self.lock_identity = self.lock.find_identity()
        self.began_to_lock = time.monotonic()
        self.is_lock_told = False
        # Of each node whose machine it could have, or not: "" or who has it. Other nodes than node 0 know their own.
        self.holders: dict[int, str] = {}
        self.gone: list[int] = []
        addresses = [own["address"]] if own["address"] else list_addresses(plan["interface"])
        self.addresses = addresses or ["127.0.0.1"]
        self.state.update(
            {
                "node": node,
                "node_name": self.name,
                "address": self.addresses[0] if node == 0 else None,
                "interface": None,
                "began": time.time(),
                "started": None,
                "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
                "gpus": machine.visible_gpus(os.environ),
                "bound": [],
                "slurm": {name: os.environ[name] for name in SLURM_FACTS if name in os.environ},
            }
        )

    def conduct(self) -> int:
        """Run all ranks on this machine to their end. Returns their highest exit code."""
        self.prepare()
        self._write_state()
        problem = self._install() or self._meet()
        if problem is not None:
            self.state["start_problem"] = problem
            self._stop("never_started", grace=0)
        elif not self.state["ended"] and self._measure_network():
            self.deadline = self.state["deadline"] = time.monotonic() + self.plan["timeout"]
            self.state["started"] = time.time()
            self.lock.mark_taken()
            self.load = load.LoadMeter(self.lock.state, self.lock.reason, preloaded=self.preloaded)
            self.clock = ClockWatch()
            self.start()
            self.watch()
            self._await_others()
            self._count_traffic()
        self.finish()
        self._leave()
        code = max((rank.facts["exit_code"] or 0 for rank in self.ranks), default=0)
        if self.node and not self.needs_all:
            return 0  # Kubernetes ends the others if a pod fails
        return code or int(any(rank.facts["started"] is None for rank in self.ranks))

    # --- start --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """As the agent of a local run, and leave a guard behind."""
        super().prepare()
        machine.start_guard(self._kill_leftovers)
        self._beat(0.0)

    def _kill_leftovers(self, reader: int) -> None:
        """Outlive the agent briefly, and kill what it leaves if it gets SIGKILL. Until then, see that it ends."""
        machine.prctl(machine.PR_SET_CHILD_SUBREAPER, 0)
        while not select.select([reader], [], [], BEAT_SECONDS)[0]:
            with contextlib.suppress(ValueError):  # without a state
                end_overdue(json.loads(machine.read_bytes(f"{self.folder}/.state/state.json") or b""))
        kill_processes(f"{self.folder}/output", seconds=60.0)

    def _install(self) -> str | None:
        """Install what the image lacks of the task's packages, for its ranks alone. Returns why that failed."""
        packages, target, log = self.plan.get("packages"), f"{self.folder}/packages", f"{self.folder}/.state/pip.log"
        if not packages:
            return None
        end = time.monotonic() + INSTALL_SECONDS
        with open(log, "wb") as sink:
            pip = subprocess.Popen(
                [self.python, "-I", "-c", _INSTALL, target, *packages],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
        while pip.poll() is None:
            self._on_time(now := time.monotonic())
            if now >= end or self.state["ended"]:
                pip.kill()
            time.sleep(CONNECT_SECONDS)
        if self.state["ended"]:  # it was canceled
            return None
        if pip.returncode:
            reason = _explain_pip(machine.read_bytes(log) or b"") or f"it took longer than {INSTALL_SECONDS:.0f} s"
            return f"{NOT_INSTALLED}{', '.join(packages)} in its image ({reason})"
        if os.path.isdir(target):  # where ranks look for installed packages
            path = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = f"{target}{os.pathsep}{path}" if path else target
        return None

    def _meet(self) -> str | None:
        """Wait until all nodes are present. Returns why the run cannot start, or None."""
        begun = time.monotonic()
        if self.node == 0:
            allow_open_files(SPARE_FILES + self.count)
            self.server, self.token = rendezvous.open_hub(self.run_folder, self.addresses, self.plan.get("hub"))
            self.selector.register(self.server, selectors.EVENT_READ, self._on_connection)
        while self.hosts is None and not self.state["ended"]:
            waits_long = self.links or not self.node
            for key, _ in self.selector.select(0.1 if waits_long else CONNECT_SECONDS):
                key.data()
            now = time.monotonic()
            self._take_lock(now)
            absent = self.plan.get("absent_seconds")
            nodes = self.count if absent is None or now < begun + absent else 1 + len(self._present())
            if self.node == 0 and len(self._present()) == nodes - 1 and self._are_locks_known():
                if problem := self._find_busy():
                    return problem
                self._announce_start()
            elif self.node and not self.links and now >= self.next_connection:
                self._connect()
            self._on_time(now)
            if self.hosts is None and now >= begun + self.plan["meeting_seconds"]:
                return self._explain_absence()
        if self.hosts is not None:
            self._take_hosts(self.hosts)
        return None

    def _explain_absence(self) -> str:
        if self.node:
            return "node 0 could not be reached"
        missing = [node for node in range(1, self.count) if node not in self._present()]
        return f"nodes {', '.join(map(str, missing[:20]))} did not report within {self.plan['meeting_seconds']:g} s"

    def _take_lock(self, now: float) -> None:
        """Take this machine's lock, and tell node 0 whether it could be had."""
        if self.node not in self.holders:
            if self.lock.acquire():
                self.holders[self.node] = ""
            elif now >= self.began_to_lock + BUSY_SECONDS:
                self.holders[self.node] = describe_holder(self.lock.read_holder())
            else:
                return
        if self.node and not self.is_lock_told and self.links:
            self.links[0].send({"do": "lock", "holder": self.holders[self.node]})
            self.is_lock_told = True

    def _are_locks_known(self) -> bool:
        """Node 0: whether it is known of all nodes that are present who has their machine. Nodes of this run that share
        a machine have one lock together."""
        held = self._held()
        return all(node in self.holders or identity in held for node, identity in self._identities().items())

    def _identities(self) -> dict[int, str | None]:
        return {0: self.lock_identity, **{node: link.lock_identity for node, link in self._present().items()}}

    def _held(self) -> set[str | None]:
        """The locks that this run has."""
        identities = self._identities()
        return {identities[node] for node, holder in self.holders.items() if not holder and identities[node]}

    def _find_busy(self) -> str | None:
        """Node 0: which machine has another run."""
        present, identities, held = self._present(), self._identities(), self._held()
        busy = {node: holder for node, holder in sorted(self.holders.items()) if holder}
        if all(identities[node] in held for node in busy):
            return None
        by_holder: dict[str, list[str]] = {}
        for node, holder in busy.items():
            by_holder.setdefault(holder, []).append(present[node].name if node else self.name)
        named = [(holder, sorted(set(names))) for holder, names in by_holder.items()]
        return "; ".join(
            f"{', '.join(names[:20])} {'is' if len(names) == 1 else 'are'} in use: {holder}"
            for holder, names in named[:5]
        )

    def _present(self) -> dict[int, RankLink]:
        return {link.node: link for link in self.links if link.node is not None and link.is_open}

    def _on_connection(self) -> None:
        assert self.server is not None
        with contextlib.suppress(BlockingIOError):
            connection, _ = self.server.accept()
            self.links.append(RankLink(connection, self.selector, self._on_message, self._on_link_end))

    def _connect(self) -> None:
        self.next_connection = time.monotonic() + CONNECT_SECONDS
        note = read_note(self.run_folder, rendezvous.RENDEZVOUS)
        if note is None:
            return
        try:
            connection = connect(note["addresses"], note["port"], 5.0)
        except OSError:
            return
        own, self.master = ends_of(connection)
        self.state["address"] = own
        link = RankLink(connection, self.selector, self._on_message, self._on_link_end)
        link.node = 0
        self.links = [link]
        self.token = note["token"]
        own_facts = {"node": self.node, "name": self.name, "time": time.time(), "lock": self.lock_identity}
        link.send({"do": "hello", "token": self.token, "place": self._listen_for_probe(own), **own_facts})

    def _announce_start(self) -> None:
        """On node 0, once all nodes are present: send the others the host names and the port."""
        present = self._present()
        names = {node: str(entry["name"] or f"node-{node}") for node, entry in enumerate(self.plan["nodes"])}
        names |= {0: self.name, **{node: link.name for node, link in present.items()}}
        hosts = [names[node] for _, node in sorted(self.node_of_worker.items())]
        self.port = machine.free_port()
        if present:
            self.addresses[0] = self.state["address"] = ends_of(next(iter(present.values())).connection)[0]
        self.master = self.addresses[0] if present else "127.0.0.1"
        places = [self._listen_for_probe(self.master), *(link.place for _, link in sorted(present.items()))]
        for link in present.values():
            link.send({"do": "go", "hosts": hosts, "port": self.port, "places": places})
        self._on_go(None, hosts, self.port, places)

    def _take_hosts(self, hosts: list[str]) -> None:
        """Complete the variables with what is known only now."""
        address = self.state["address"] or self.master
        interface = self.plan["interface"] or find_interface(address if self.count > 1 else "127.0.0.1")
        self.state.update({"interface": interface, "master_address": self.master, "master_port": self.port})
        environment = self.plan["environment"]
        environment.update(MASTER_ADDR=self.master, MLBENCH_HOSTS=",".join(hosts))
        for name in self.plan["interface_variables"]:
            if interface:
                environment.setdefault(name, interface)

    # --- the network between the nodes ---------------------------------------------------------------------------

    def _listen_for_probe(self, own: str) -> tuple[str, int, str] | None:
        """Where neighbors will measure the network, and which network stack that is; None if they will not. `own`: this
        machine's address on the way to node 0, unless another interface was chosen."""
        if self.count == 1 or not self.needs_all:
            return None
        variables = {**os.environ, **self.plan["environment"]}
        named = (variables.get(name, "") for name in self.plan["interface_variables"])
        chosen = self.plan["interface"] or next(filter(None, named), "").lstrip("=").partition(",")[0]
        address = next(iter(list_addresses(chosen)), own) if chosen else own
        if self.probe_listener is None:
            self.probe_listener = listen(backlog=self.count + 8)
        return address, self.probe_listener.getsockname()[1], probe.stack_identity()

    def _measure_network(self) -> bool:
        """Measure the network between the nodes; whatever fails is part of the report. False if the run was ended."""
        if (meeting := self.meeting) is None:
            return True
        found: dict[str, Any] = {}
        work = threading.Thread(
            target=lambda: found.update(probe.measure_network(self.node, probe.BEFORE, meeting)), daemon=True
        )
        work.start()
        while work.is_alive() and not self.state["ended"]:
            for key, _ in self.selector.select(CONNECT_SECONDS):
                key.data()
            self._on_time(time.monotonic())
        if self.node == 0 and found:
            self._write_resources([{"time": time.time(), "kind": "network", **found}])
        return not self.state["ended"]

    def _count_traffic(self) -> None:
        """Record what this machine's interface has counted until now."""
        if self.meeting is not None:
            counters = probe.read_counters(find_interface(self.meeting.places[self.node][0]))
            self._write_resources([{"time": time.time(), "kind": "interface", **counters}])

    # --- ranks ---------------------------------------------------------------------------------------------------

    def _start(self, rank: Rank) -> None:
        super()._start(rank)
        if not rank.pid:
            return
        cpus = None
        with contextlib.suppress(OSError, AttributeError):  # it may have ended
            cpus = sorted(os.sched_getaffinity(rank.pid))
        gpus = self._environment(rank).get("CUDA_VISIBLE_DEVICES")
        self.state["bound"].append({"rank": rank.number, "cpus": cpus, "gpus": gpus.split(",") if gpus else []})

    def _environment(self, rank: Rank) -> dict[str, str]:
        environment = super()._environment(rank)
        environment.pop("SLURM_EXPORT_ENV", None)
        return environment

    def _await_others(self) -> None:
        """Where only node 0 has a command, the other nodes wait here until node 0 says that it has ended."""
        if self.node == 0:
            for link in self._present().values():
                link.send({"do": "over"})
        elif self.plan["stays"] and not any(rank.argv for rank in self.ranks):
            while not (self.is_over or self.state["ended"]) and self._present():
                for key, _ in self.selector.select(0.5):
                    key.data()
                self._on_time(time.monotonic())

    # --- watch --------------------------------------------------------------------------------------------------

    def _on_message(self, link: RankLink, message: Mapping[str, Any]) -> None:
        if self.node == 0 and link.node is None:
            self._admit(link, message)
            return
        actions: dict[str, Callable[..., None]] = {
            "go": self._on_go,
            "lock": self._on_lock,
            "faults": self._on_faults,
            "stop": self._on_stop,
            "over": self._on_over,
            "bye": self._on_bye,
            "ping": lambda link: None,
        }
        carry_out(actions, message, link)

    def _admit(self, link: RankLink, message: Mapping[str, Any]) -> None:
        """Take a node into the run whose first message is a hello with the run's token."""
        node = message.get("node")
        known = is_token(message.get("token"), self.token)
        if not known or not isinstance(node, int) or not 0 < node < self.count or node in self._present():
            link.close()
            return
        link.node, link.name = node, str(message.get("name"))
        link.place = message.get("place")
        link.lock_identity = None if message.get("lock") is None else str(message["lock"])
        link.clock_offset = time.time() - float(message.get("time") or 0.0)
        if self.hosts is not None:  # it is late
            link.send({"do": "go", "hosts": self.hosts, "port": self.port, "places": []})

    def _on_go(self, link: RankLink | None, hosts: list[str], port: int, places: list[Any]) -> None:
        if self.hosts is not None:
            return
        self.port, self.hosts = port, hosts
        if self.probe_listener is not None and len(places) == self.count:
            known = [(address, number) for address, number, _ in places]
            stacks = {stack for _, _, stack in places}
            self.meeting = probe.Meeting(self.probe_listener, known, self.token, len(stacks))

    def _on_lock(self, link: RankLink, holder: str) -> None:
        assert link.node is not None
        self.holders[link.node] = holder

    def _on_faults(self, link: RankLink, message: Mapping[str, Any]) -> None:
        assert link.node is not None
        if self.faults is not None:
            self.faults.take(link.node, message)

    def _on_stop(self, link: RankLink, cause: Cause) -> None:
        self._take_first({**cause, "time": cause["time"] + link.clock_offset})
        self._stop(cause["why"], GRACE, own=False)
        if self.node == 0:
            self._send_stop(besides=link)

    def _on_over(self, link: RankLink) -> None:
        self.is_over = True

    def _on_bye(self, link: RankLink) -> None:
        link.has_left = True
        link.close()

    # --- faults and attempts: node 0 leads ------------------------------------------------------------------------

    def find_node(self, *, rank: int | None = None, worker: int | None = None) -> int:
        """The node of a rank or of a worker. Raises LookupError."""
        if rank is not None:
            return self.node_of_rank[rank]
        assert worker is not None
        return self.node_of_worker[worker]

    def send_faults(self, node: int, message: Mapping[str, Any]) -> None:
        """Send a message of `faults`: an order to another node, or a report to node 0."""
        link = self._present().get(node)
        if link is not None:  # else it has been lost
            link.send({"do": "faults", "message": message})

    def fail(self, number: int, code: int) -> None:
        """End the run with the failure of this rank, on whichever node it is."""
        node = self.find_node(rank=number)
        self.state["first"] = {"why": "failed", "node": node, "rank": number, "time": time.time()}
        self._send_stop()
        super().fail(number, code)

    # --- the others ------------------------------------------------------------------------------------------------

    def _on_link_end(self, link: RankLink) -> None:
        if link.has_left or link.node is None or (self.node and self.state["finished"]):
            return
        if self.hosts is None:  # it may come back
            self.holders.pop(link.node, None)
            self.is_lock_told = False
            self.links = [other for other in self.links if other is not link]
            return
        if self.node == 0 and not self.needs_all:
            return
        self.gone.append(link.node)
        lost: Cause = {"why": "lost", "node": link.node, "rank": None, "time": time.time()}
        self.state["first"] = self.state["first"] or lost
        self._stop("failed", GRACE, own=False)
        if self.node == 0:
            self._send_stop()

    def _take_first(self, cause: Cause) -> None:
        """Keep what came first: two ranks that fail within milliseconds are ordered by the clock of node 0."""
        known = self.state["first"]
        if known is None or (known["why"] == cause["why"] == "failed" and cause["time"] < known["time"]):
            self.state["first"] = cause

    def _send_stop(self, besides: RankLink | None = None) -> None:
        first = self.state["first"]
        assert first is not None
        cause = {**first, "why": "failed" if first["why"] == "lost" else first["why"]}
        for link in list(self.links):
            if link is not besides:
                link.send({"do": "stop", "cause": cause})

    def _stop(self, why: str, grace: float, *, own: bool = True) -> None:
        if own and not self.state["ended"] and not self.state["first"]:
            rank = self.state["first_failed"]
            self.state["first"] = {"why": why, "node": self.node, "rank": rank, "time": time.time()}
            if self.needs_all or self.node == 0:
                self._send_stop()
        super()._stop(why, min(grace, self.plan["grace"]) if grace else 0)

    def _on_time(self, now: float) -> None:
        if self.state["started"] and not self.state["finished"]:
            super()._on_time(now)
        elif self.canceled and not self.state["started"]:
            self._stop("canceled", grace=0)
        self._beat(now)
        if now > self.last_turn + STALL_SECONDS:  # this process was stopped, perhaps with all others of its job
            for link in self.links:
                link.excuse_silence(now)
        self.last_turn = now
        for link in list(self.links):
            link.tick(now)
        if now >= self.next_look:
            self.next_look = now + LOOK_SECONDS
            if os.path.exists(f"{self.run_folder}/cancel") or self._is_deleted():
                self._stop("canceled", GRACE)
            asked = machine.read_bytes(f"{self.run_folder}/stacks")
            if asked != self.stacks_asked:
                self.stacks_asked, self.are_stacks_wanted = asked, True

    def _is_deleted(self) -> bool:
        """Whether the run's folder is gone. Another one of its name is that of another run, in which nothing is
        written."""
        try:
            return not os.path.samestat(os.stat(self.run_folder), self.run_status)
        except OSError:
            return True

    def _beat(self, now: float) -> None:
        if now < self.next_beat or self._is_deleted():
            return
        self.next_beat = now + BEAT_SECONDS
        with contextlib.suppress(OSError):
            touch(f"{self.folder}/.state/beat")

    def _write_state(self, last: bool = False) -> None:
        if not self._is_deleted():
            super()._write_state(last)

    def _write_resources(self, lines: Iterable[dict[str, Any]]) -> None:
        if self._is_deleted():
            return
        super()._write_resources([{**row, "worker": self.node} if row.get("kind") else row for row in lines])

    # --- end ----------------------------------------------------------------------------------------------------

    def _pack(self) -> None:
        """Output and samples as one archive, and the digests of archive and logs: what a client fetches is these."""
        if self._is_deleted():
            return
        path = f"{self.folder}/.state/archive.tar"
        results: dict[str, object] = {"schema_version": SCHEMA_VERSION, "archive": None, "logs": {}, "problem": None}
        try:
            with replace_file(path, is_durable=False) as file, tarfile.open(fileobj=file, mode="w") as archive:
                names = ("output", "resources.jsonl", "faults.json")
                collects = self.plan["collects"]
                chosen = names if collects is None or self.node in collects else names[1:]
                there = [name for name in chosen if os.path.exists(f"{self.folder}/{name}")]
                left_out = add_files(archive, file, self.folder, there)
            results["archive"] = digest(path)
            if left_out:
                more = f"; and {len(left_out) - LISTED} more" if len(left_out) > LISTED else ""
                results["problem"] = "; ".join(left_out[:LISTED]) + more
            logs = {rank.number: f"{self.folder}/logs/rank-{rank.number}.log" for rank in self.ranks}
            results["logs"] = {number: digest(log) for number, log in logs.items() if os.path.exists(log)}
        except OSError as error:
            results["problem"] = error.strerror or str(error)
        if not self._is_deleted():
            with contextlib.suppress(OSError):
                write_atomically(f"{self.folder}/.state/results.json", json.dumps(results).encode())

    def _leave(self) -> None:
        """Pack, which may take minutes, and give signs of life meanwhile. Then node 0 passes on what ends the run until
        the others have left; they leave at once."""
        packing = threading.Thread(target=self._pack)
        packing.start()
        packing.join(SOON)
        end, written = None, self.state["first"]
        while packing.is_alive() or (self.node == 0 and self._present()):
            now = time.monotonic()
            if self.state["first"] != written:
                written = self.state["first"]
                self._write_state(last=True)
            if self.state["first"] and end is None:
                end = now + LINGER_SECONDS
            if end is not None and now >= end and not packing.is_alive():
                break
            for key, _ in self.selector.select(0.2):
                key.data()
            self._on_time(now)
        if self.state["first"] != written:
            self._write_state(last=True)
        for link in self.links:
            link.send({"do": "bye"})


def _explain_pip(log: bytes) -> str:
    """Why pip failed: its last line, which says that no version was found, and the last warning before it, which says
    that the index does not answer, or has no TLS and is not trusted."""
    warnings = [line for line in log.splitlines() if line.startswith(b"WARNING: ")]
    # "Retrying (...) after connection broken by 'NewConnectionError('<... object at 0x...>: Failed to establish ...')'"
    told = last_line(warnings[-1]) if warnings else ""
    told = re.sub(r"^WARNING: (.*connection broken by )?|<[^>]*object at[^>]*>: ", "", told)
    return "; ".join(filter(None, (last_line(log).removeprefix("ERROR: "), told)))


def add_files(archive: tarfile.TarFile, target: BinaryIO, folder: str, names: Iterable[str]) -> list[str]:
    """Add these files and folders of `folder` to an archive that is written to `target`. Returns what could not be
    read, each with the reason. Raises OSError if the disk is full.

    TarFile.add would give up at the first such file, and at folders that are nested too deeply.
    """
    left_out, pending = [], list(names)
    while pending:
        name = pending.pop()
        path, start = f"{folder}/{name}", archive.offset
        try:
            mode = let_read(path)
            if stat.S_ISREG(mode):
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
                    archive.addfile(archive.gettarinfo(arcname=name, fileobj=source), source)
                continue
            if stat.S_ISDIR(mode):
                if len(os.fsencode(name)) > MAX_FOLDER_BYTES:
                    raise OSError("it is nested too deeply")
                pending += [f"{name}/{inner}" for inner in sorted(os.listdir(path), reverse=True)]
            if (member := archive.gettarinfo(path, name)) is not None:  # sockets have none
                archive.addfile(member)
        except OSError as error:
            if machine.is_full(error):
                raise
            target.seek(start)  # without the beginning of a file that has become shorter since
            target.truncate()
            archive.offset = start
            left_out.append(f"{ascii(name)[1:-1]} ({error.strerror or error})")
    return left_out


def digest(path: str) -> Mapping[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    sha, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while piece := file.read(BLOCK):
            sha.update(piece)
            size += len(piece)
    return {"size": size, "sha256": sha.hexdigest()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
