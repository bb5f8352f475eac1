"""The plan of an acceptance test, driven by rank 0, and its evidence.

Every rank obeys rank 0 over one connection (`node.py`). There is no rendezvous: whoever does not come, or does not
answer in time, is written down as silent and asked no more. Every node is screened alone and in pairs; suspects are
measured again beside healthy peers; and whoever is not named by then is measured together. Rank 0 decides what is
measured; the judge decides what it means, from the lines of all logs.
"""

import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NamedTuple

from task_images.certify import rules
from task_images.certify.node import START_SECONDS, Job, as_connection, obey, say, send, writing
from task_images.certify.rules import Evidence, Sample
from task_images.contract import Contract, PeerLostError, emit
from task_images.facts import code_facts, machine_facts
from task_images.parameters import Task, parameter, read_parameters


@dataclass(frozen=True)
class Settings:
    """Parameters of the task."""

    stages: list[str] = parameter(list(rules.STAGES[:-1]), "what is measured, in this order", choices=rules.STAGES)
    limit_seconds: float = parameter(60.0, "longest time of one measurement, after which its process is killed", min=1)
    rounds: int = parameter(3, "how often every node and pair is measured for the screen", min=1, max=100)
    burst_seconds: float = parameter(0.25, "duration of a short measurement", min=0.01, max=600)
    sustained_seconds: float = parameter(1.0, "duration of a sustained matrix product", min=0.01, max=3600)
    disk_bytes: int = parameter(33554432, "size of the file that is written and removed; 0: none", min=0, max=1 << 40)
    pair_bytes: int = parameter(
        0, "size of the all-reduce of two nodes; 0: 16 MiB, on GPUs 256 MiB", min=0, max=1 << 40
    )
    matchings: int = parameter(8, "rounds of pairs of more than 16 nodes; 0: all", min=0, max=10000)
    sizes: list[int] = parameter(
        [1048576, 16777216], "bytes of collectives among all nodes, the larger side", kind="sizes"
    )
    samples: int = parameter(7, "calls of each collective and size", min=3, max=10000)
    training_seconds: float = parameter(10.0, "duration of the reference training", min=0.1, max=864000)
    least_dip_seconds: float = parameter(
        rules.LEAST_DIP,
        "mean length of disturbances of a healthy node that the confirmation outlasts; less voids the error rate",
        min=0,
        max=86400,
    )
    confirm_seconds: float = parameter(
        3600.0, "when the confirmation ends, since the start; who is not decided by then is on watch", min=0, max=864000
    )
    soak_hours: float = parameter(0.0, "how long the stage soak repeats the others", min=0, max=720)
    recheck: str = parameter("", "the node that is measured again, beside others that were ok")
    earlier: str = parameter("", "SHA-256 of the archive of the earlier certificate that this one is linked to")
    expect: str = parameter("", "published figures to compare with, as a JSON list (see --expect of mlbench certify)")


_STANDARD = {
    "limit_seconds": 600.0,
    "burst_seconds": 5.0,
    "sustained_seconds": 60.0,
    "disk_bytes": 2147483648,
    "matchings": 63,
    "sizes": "1MiB:128MiB:x2",
    "samples": 20,
    "training_seconds": 600.0,
    "confirm_seconds": 7200.0,
}
TASK = Task(
    settings=Settings,
    number="0b",
    title="Acceptance test of a cluster: every node alone, in pairs and together (see mlbench certify)",
    backends=["gloo", "nccl"],
    measured_on=["CPU"],
    data="none",
    absent="3m",
    notes=['Samples are lines of the logs that begin with "certify"; certificate.json follows from them.'],
    presets={
        "standard": _STANDARD,
        "soak": {
            **_STANDARD,
            "stages": list(rules.STAGES),
            "least_dip_seconds": 1800.0,
            "confirm_seconds": 21600.0,
            "soak_hours": 24.0,
        },
        "tiny": {
            "burst_seconds": 0.05,
            "sustained_seconds": 0.1,
            "disk_bytes": 1048576,
            "pair_bytes": 262144,
            "sizes": [262144],
            "samples": 3,
            "training_seconds": 0.5,
            "least_dip_seconds": 0.0,
            "confirm_seconds": 120.0,
        },
    },
)


_SLACK = 15.0  # seconds beyond a job's limit at most, for its process to be killed and to say so
_WATCH_SECONDS = 5.0  # between two looks at healthy peers, at least
_REPORT_SECONDS = 10.0  # between two reports of progress, at most
_LATE_SECONDS = 60.0  # by which ranks may load their libraries later than the first one, at most
_ALL_PAIRS = 16  # up to this many nodes every pair is measured
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_HELLO_SECONDS, _HELLO_BYTES = 5.0, 1 << 16  # of a rank's first message; others may connect, too


class Member(NamedTuple):
    """A rank as rank 0 sees it."""

    connection: Connection
    address: str
    node: int
    machine: str
    port: int | None  # of its store, where groups meet
    offset: float  # by which its clock is late, in seconds


class Ranks:
    """The ranks that came, their jobs and their answers."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.members: dict[int, Member] = {}
        self.silent: set[int] = set()
        self._restarting: set[int] = set()  # whose process was killed
        self._groups = 0

    def gather(self, listener: socket.socket, late: float) -> None:
        """Accept ranks until all are there, or for `late` seconds after the first have loaded their libraries: the
        agents have waited for machines already."""
        deadline = time.monotonic() + START_SECONDS
        while len(self.members) < self.contract.world_size and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError, ValueError, KeyError, TypeError):
                link, (address, *_) = listener.accept()
                address = address.removeprefix("::ffff:")  # IPv4, as IPv6 writes it
                connection = as_connection(link)
                hello = json.loads(connection.recv_bytes(_HELLO_BYTES)) if connection.poll(_HELLO_SECONDS) else {}
                if hello["run"] == self.contract.run_id:
                    offset = time.time() - hello["time"]
                    member = Member(connection, address, hello["node"], hello["machine"], hello["port"], offset)
                    self.members.setdefault(hello["rank"], member)
                    deadline = min(deadline, time.monotonic() + late)
        for rank in set(range(self.contract.world_size)) - set(self.members):
            self._lose(rank, "start")

    def ask(
        self, stage: str, jobs: Mapping[int, Job], report: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, float]]:
        """Give each rank its job; what those measured that answered in time. The others are asked no more. `report` is
        called at first, and while they measure for long."""
        asked, found = set(jobs) - self.silent, dict[int, dict[str, float]]()
        limit = max((job["limit"] for job in jobs.values()), default=0.0)
        restarts = START_SECONDS if self._restarting & asked else 0.0
        deadline = time.monotonic() + limit + min(_SLACK, limit) + restarts
        self._restarting -= asked
        with DefaultSelector() as selector:
            for rank in asked:
                send(self.members[rank].connection, jobs[rank])
                selector.register(self.members[rank].connection, EVENT_READ, rank)
            report()
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                if not (ready := selector.select(min(left, _REPORT_SECONDS))):
                    report()
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    with suppress(OSError, EOFError, ValueError):
                        answer = json.loads(self.members[key.data].connection.recv_bytes())
                        found[key.data] = answer["values"]
                        self._restarting |= {key.data} if answer["restarts"] else set()
        for rank in jobs.keys() - found.keys() - self.silent:
            self._lose(rank, stage)
        return found

    def _lose(self, rank: int, stage: str) -> None:
        self.silent.add(rank)
        say("silent", rank=rank, stage=stage)

    def nodes(self, without: Iterable[int] = ()) -> dict[int, list[int]]:
        """Node -> its ranks, of the nodes whose ranks all answer."""
        every: dict[int, list[int]] = {}
        for rank, member in self.members.items():
            every.setdefault(member.node, []).append(rank)
        lost = {rank // self.contract.local_world_size for rank in self.silent} | set(without)
        return {node: sorted(every[node]) for node in sorted(every) if node not in lost}

    def take_turns(self) -> bool:
        """Whether nodes share a machine, so that what they measured at once would be each other."""
        machines = [self.members[ranks[0]].machine for ranks in self.nodes().values()]
        return len(set(machines)) < len(machines)

    def group_jobs(self, ranks: Sequence[int], job: Job) -> dict[int, Job]:
        """The job for each rank of a group, of which only the first one's answer counts."""
        self._groups += 1
        first = self.members[ranks[0]]
        host = self.contract.master_addr if first.node == 0 else first.address
        group = {"group": f"group-{self._groups}", "store": [host, first.port], "size": len(ranks)}
        return {rank: {**job, **group, "rank": place} for place, rank in enumerate(ranks)}


class Coordinator:
    """Rank 0: asks the others, and finds out by their answers what to ask next."""

    def __init__(self, ranks: Ranks, settings: Settings) -> None:
        self.ranks, self.settings, self.contract = ranks, settings, ranks.contract
        self.begun = time.monotonic()
        self.per_node = self.contract.local_world_size
        self.pair_bytes = settings.pair_bytes or ((256 << 20) if self.contract.device == "gpu" else (16 << 20))
        self.evidence = Evidence(self.per_node, settings.least_dip_seconds)
        self.soaks_since: float | None = None

    @property
    def seconds(self) -> float:
        """Since the start, by this machine's monotonic clock."""
        return round(time.monotonic() - self.begun, 3)

    def run(self) -> None:
        """All stages."""
        asked, nodes = self.settings.stages, self.ranks.nodes
        clocks = {rank: round(member.offset, 3) for rank, member in self.ranks.members.items()}
        say("scope", turns=self.ranks.take_turns(), clocks=clocks)
        rounds = self.settings.rounds
        for number in range(rounds if "node" in asked else 0):
            self._progress("node", number, rounds)
            self.measure_nodes(list(rules.TESTS), nodes(), {"round": number})
        if "pairs" in asked:
            most = None if len(nodes()) <= _ALL_PAIRS else self.settings.matchings or None
            matched = rules.make_rounds(list(nodes()), most, self.contract.seed) * rounds
            for number, pairings in enumerate(matched):
                self._progress("pairs", number, len(matched))
                self.measure_pairs(pairings, {"round": number})
        self.confirm()
        named = {
            node
            for suspect, found in zip(self.evidence.suspects, self.evidence.confirm(), strict=True)
            if found.is_named and len(suspect.who) == 1  # and not only a link
            for node in self.evidence.nodes_of(suspect)
        }
        self.measure_together(named)
        if "soak" in asked:
            self.soak(named)
        say("end", at=self.seconds)

    def soak(self, named: set[int]) -> None:
        """Repeat the tests of nodes, and collectives and training, for hours."""
        self.soaks_since, cycle = self.seconds, 0
        while self.seconds - self.soaks_since < 3600 * self.settings.soak_hours:
            cycle += 1
            self._progress("soak", cycle, cycle)
            self.measure_nodes(list(rules.TESTS), self.ranks.nodes(), {"cycle": cycle})
            self.measure_together(named, cycle)

    def _progress(self, phase: str, step: int, steps: int) -> None:
        if self.soaks_since is not None:  # for hours, in minutes, whatever a cycle measures now
            phase, step, steps = "soak", int(self.seconds - self.soaks_since) // 60, int(60 * self.settings.soak_hours)
        with writing:
            emit("phase", 0, phase=phase, step=step, steps=max(1, steps))

    def _progress_training(self, since: float) -> None:
        """In seconds: it is one job of many minutes."""
        seconds = self.settings.training_seconds
        self._progress("training", int(min(seconds, self.seconds - since)), math.ceil(seconds))

    # --- measurements -----------------------------------------------------------------------------------------------

    def measure_nodes(self, tests: Sequence[str], nodes: Mapping[int, list[int]], tag: Job) -> None:
        """One round of tests on `nodes`."""
        options = self.settings
        job = {
            "do": "node",
            "tests": [test for test in tests if test != "disk.write" or options.disk_bytes],
            "seconds": options.burst_seconds,
            "long": options.sustained_seconds,
            "disk_bytes": options.disk_bytes,
        }
        for turn in self._turns(nodes):
            self._rate("node", {rank: job for node in turn for rank in nodes[node]}, tag)
        if "local_all_reduce" in tests and self.per_node > 1:
            for turn in self._turns(nodes.keys() & self.ranks.nodes().keys()):
                groups = (self._all_reduce(nodes[node], "local_all_reduce", options.samples) for node in turn)
                self._rate("node", {rank: job for group in groups for rank, job in group.items()}, tag)

    def measure_pairs(self, matched: Sequence[rules.Pair], tag: Job) -> None:
        """An all-reduce of each pair of nodes."""
        for turn in self._turns(matched):
            alive = self.ranks.nodes()
            jobs: dict[int, Job] = {}
            for pair in turn:
                if set(pair) <= alive.keys():
                    jobs |= self._all_reduce([rank for node in pair for rank in alive[node]], "network", 5, pair)
            self._rate("pairs", jobs, tag)

    def _turns(self, items: Iterable[Any]) -> list[list[Any]]:
        """What is measured at once."""
        ordered = sorted(items)
        return [[item] for item in ordered] if self.ranks.take_turns() else [ordered]

    def _all_reduce(
        self, ranks: Sequence[int], test: str, samples: int, unit: rules.Unit | None = None
    ) -> dict[int, Job]:
        job = {
            "do": "all_reduce",
            "test": test,
            "operation": "all_reduce",
            "bytes": self.pair_bytes,
            "samples": samples,
        }
        return self.ranks.group_jobs(ranks, {**job, "unit": unit})

    def _rate(self, stage: str, jobs: Mapping[int, Job], tag: Job) -> None:
        """Add what the ranks measure to the evidence, here as in their logs."""
        tag, limit = {"at": self.seconds, **tag}, self.settings.limit_seconds
        asked = {
            rank: {**job, "say": "rates", "tag": {**tag, "unit": job.get("unit")}, "limit": limit}
            for rank, job in jobs.items()
        }
        for rank, answer in self.ranks.ask(stage, asked).items():
            for test, rate in answer.items() if jobs[rank].get("rank", 0) == 0 else ():
                self.evidence.add(Sample(test, jobs[rank].get("unit") or (rank,), rate, **tag))

    def measure_together(self, named: set[int], cycle: int | None = None) -> None:
        """Collectives and training of all nodes that answer, but for those that were named; again without whoever fell
        silent meanwhile."""
        options, asked = self.settings, self.settings.stages
        jobs: list[tuple[str, Job]] = []
        for size in options.sizes if "collectives" in asked else ():
            for name in _OPERATIONS:
                job = {"do": "collective", "samples": options.samples, "limit": options.limit_seconds}
                jobs.append(("collectives", {**job, "operation": name, "bytes": size}))
        if "training" in asked:
            limit = options.limit_seconds + 2 * options.training_seconds
            jobs.append(("training", {"do": "training", "seconds": options.training_seconds, "limit": limit}))
        ranks: list[int] = []
        while (alive := [rank for own in self.ranks.nodes(named).values() for rank in own]) != ranks and len(alive) > 1:
            ranks = alive
            for step, (stage, order) in enumerate(jobs):
                report = partial(self._progress, stage, step, len(jobs))
                if stage == "training":
                    report = partial(self._progress_training, self.seconds)
                tag: Job = {key: order[key] for key in ("operation", "bytes") if key in order}
                tag |= {"ranks": ranks, "cycle": cycle}
                asked_of = self.ranks.group_jobs(ranks, {**order, "say": order["do"], "tag": tag})
                self.ranks.ask(stage, asked_of, report)
                if self.ranks.silent & {*ranks}:
                    break

    # --- confirmation -----------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """Measure suspects again, at moments that are spread so far that disturbances end before the first look, and
        see meanwhile how long disturbances of healthy peers last."""
        evidence = self.evidence
        evidence.open_cases(self.seconds)
        say("screened", at=evidence.screened, cases=evidence.cases)
        for moment in range(max(rules.LOOKS)):
            watched, due = self.seconds, self.seconds + evidence.pause(self.seconds, moment)
            while (left := due - self.seconds) > 0 and (numbers := self._undecided(moment)):
                if self.seconds > self.settings.confirm_seconds:
                    return
                self._progress("confirming", moment, max(rules.LOOKS))
                watch = max(_WATCH_SECONDS, evidence.span / 100)
                if left > watch and self.seconds >= watched:
                    for number in numbers:
                        self._measure_case(number, {"case": number}, ())
                    watched = self.seconds + watch
                time.sleep(max(0.0, min(watch, _REPORT_SECONDS, due - self.seconds)))
            for number in self._undecided(moment):
                self._measure_case(number, {"case": number, "moment": moment}, evidence.cases[number].who)

    def _undecided(self, moment: int) -> list[int]:
        """Cases that this moment may decide: those that missed none, and whose nodes and peers answer."""
        alive, found = self.ranks.nodes().keys(), self.evidence.confirm()
        return [
            number
            for number, case in enumerate(self.evidence.cases)
            if found[number].is_named is None
            and found[number].of == moment
            and set(self.evidence.nodes_of(case)) <= alive
            and len(case.peers) >= (2 if case.test == "network" else 1)
        ]

    def _measure_case(self, number: int, tag: Job, who: rules.Unit) -> None:
        """The test of a case on its peers, and on `who` of it."""
        test, _, peers, _ = self.evidence.cases[number]
        if test != "network":
            nodes, wanted = self.ranks.nodes(), {rank // self.per_node for rank in (*who, *peers)}
            self.measure_nodes([test], {node: nodes[node] for node in sorted(wanted & nodes.keys())}, tag)
            return
        one, other = random.Random(f"{self.contract.seed} {number} {tag.get('moment')}").sample(peers, 2)
        chosen = [(one, other)] if not who else [who, *((end, one) for end in who)]
        if len(who) == 1:
            chosen = [(who[0], one), (one, other)]
        for first, second in chosen:
            self.measure_pairs([(min(first, second), max(first, second))], tag)


def listen(port: int) -> socket.socket:
    """Take connections on all interfaces, of IPv6, too: a cluster may have nothing else."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def main(contract: Contract) -> None:
    """Obey rank 0, and on rank 0 also give the orders. Raises PeerLostError if a rank fell silent: that ends the run
    of ranks that can do nothing any more, too."""
    settings = read_parameters(Settings, contract.parameters)
    if contract.rank:
        obey(contract, (contract.master_addr, contract.master_port))
        return
    emit("environment", 0, **machine_facts(), **code_facts())
    emit("phase", 0, phase="starting")
    listener = listen(contract.master_port)
    own = threading.Thread(target=obey, args=(contract, ("127.0.0.1", contract.master_port)), daemon=True)
    own.start()
    ranks = Ranks(contract)
    ranks.gather(listener, min(_LATE_SECONDS, settings.limit_seconds))
    coordinator = Coordinator(ranks, settings)
    coordinator.run()
    for member in ranks.members.values():
        send(member.connection, {"do": "end"})
    own.join(timeout=_SLACK)
    if ranks.silent:
        names = ", ".join(map(str, sorted(ranks.silent)[:8]))
        raise PeerLostError(f"{len(ranks.silent)} ranks do not answer: {names}", "The certificate names them.")
    emit(
        "result",
        0,
        outcome="completed",
        goal=None,
        wall_seconds=coordinator.seconds,
        training_seconds=None,
        timings={},
        synthetic=False,
        details={"answered": len(ranks.members)},
    )
