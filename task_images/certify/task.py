"""The plan of an acceptance test, driven by rank 0, and its evidence.

Every rank obeys rank 0 over one connection (`node.py`). There is no rendezvous: whoever does not come, or does not
answer in time, is written down as silent and asked no more. Suspects of the screen (`rules.screen`) are kept out of the
stages that need all nodes, and are measured again between them, together with healthy peers. Rank 0 decides what is
measured; the judge decides what it means, from the lines of all logs.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from task_images.certify import Settings, pairs, rules
from task_images.certify.node import START_SECONDS, obey, say
from task_images.contract import Contract, emit
from task_images.errors import PeerLostError
from task_images.facts import code_facts, machine_facts
from task_images.parameters import read_parameters

_SLACK = 15.0  # seconds beyond a job's limit at most, for its process to be killed and to say so
_WATCH_SECONDS = 5.0  # between two looks at healthy peers, at least
_LATE_SECONDS = 60.0
_ALL_PAIRS = 16  # up to this many nodes every pair is measured
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Case(NamedTuple):
    """A suspect under confirmation."""

    number: int
    test: str
    suspect: tuple[int, ...]  # a rank; of "network" a node, or the two of a link
    peers: tuple[int, ...]


class Member:
    """A rank as rank 0 sees it."""

    def __init__(self, hello: dict[str, Any], connection: socket.socket, address: str) -> None:
        self.rank, self.node = int(hello["rank"]), int(hello["node"])
        self.machine, self.port = str(hello["machine"]), hello["port"]
        self.address = address
        self.offset = time.time() - float(hello["time"])
        self.stream = connection.makefile("rw", encoding="utf-8")
        self.answers: dict[int, dict[str, Any]] = {}
        self.is_gone = False


class Coordinator:
    """Rank 0: asks the others, and measures by their answers what to ask next."""

    def __init__(self, contract: Contract, settings: Settings) -> None:
        self.contract, self.settings = contract, settings
        self.begun = time.monotonic()
        self.members: dict[int, Member] = {}
        self.silent: set[int] = set()
        self._next = 0
        self._told = threading.Condition()
        self._cases: list[Case] = []
        self._moments: dict[int, list[tuple[float, bool]]] = {}  # case -> seconds since the screen, and whether slow
        # case -> peer, of the network two of them -> seconds and values
        self._dips: dict[int, dict[int | pairs.Pair, list[tuple[float, float]]]] = {}
        self._values: dict[str, dict[str, list[float]]] = {}  # test -> rank -> values
        self._moment, self._due, self._screened = 0, float("inf"), 0.0

    @property
    def seconds(self) -> float:
        """Since the start, by this machine's monotonic clock."""
        return round(time.monotonic() - self.begun, 3)

    # --- the others -------------------------------------------------------------------------------------------------

    def gather(self, listener: socket.socket) -> None:
        """Accept ranks until all are there, or for a while after the first have loaded their libraries: the agents have
        waited for machines already."""
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        with self._told:
            while len(self.members) < self.contract.world_size and time.monotonic() < deadline:
                if self.members:
                    deadline = min(deadline, time.monotonic() + _LATE_SECONDS)
                self._told.wait(max(0, deadline - time.monotonic()))
        for rank in set(range(self.contract.world_size)) - set(self.members):
            self._lose(rank, "start", _LATE_SECONDS)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, (address, *_) = listener.accept()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection, address), daemon=True).start()

    def _hear(self, connection: socket.socket, address: str) -> None:
        member: Member | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            for line in connection.makefile("r", encoding="utf-8"):
                message = json.loads(line)
                with self._told:
                    if member is None:
                        if message["run"] != self.contract.run_id or message["rank"] in self.members:
                            return
                        member = Member(message, connection, address)
                        self.members[member.rank] = member
                    else:
                        member.answers[message["id"]] = message
                    self._told.notify_all()
        if member is not None:
            with self._told:
                member.is_gone = True
                self._told.notify_all()

    def ask(self, stage: str, jobs: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Give each rank its job; the answers of those that answered in time. The others are asked no more."""
        self._next += 1
        number, limit = self._next, max((job["limit"] for job in jobs.values()), default=0.0)
        asked = {rank: job for rank, job in jobs.items() if rank not in self.silent}
        for rank, job in asked.items():
            with suppress(OSError, ValueError):
                stream = self.members[rank].stream
                stream.write(json.dumps({"id": number, **job}) + "\n")
                stream.flush()

        def is_done() -> bool:
            return all(number in self.members[rank].answers or self.members[rank].is_gone for rank in asked)

        with self._told:
            self._told.wait_for(is_done, limit + min(_SLACK, limit))
            found = {rank: self.members[rank].answers.pop(number, None) for rank in asked}
        for rank, answer in found.items():
            if answer is None:
                self._lose(rank, stage, limit)
        return {rank: answer for rank, answer in found.items() if answer is not None}

    def _lose(self, rank: int, stage: str, seconds: float) -> None:
        self.silent.add(rank)
        say("silent", rank=rank, stage=stage, seconds=seconds, at=self.seconds)

    def nodes(self, without: Iterable[int] = ()) -> dict[int, list[int]]:
        """Node -> its ranks, of the nodes whose ranks all answer."""
        every: dict[int, list[int]] = {}
        for member in self.members.values():
            every.setdefault(member.node, []).append(member.rank)
        lost = {self._node_of(rank) for rank in self.silent} | set(without)
        return {node: sorted(every[node]) for node in sorted(every) if node not in lost}

    def _node_of(self, rank: int) -> int:
        return rank // self.contract.local_world_size

    @property
    def takes_turns(self) -> bool:
        """Whether nodes share a machine, so that what they measured at once would be each other."""
        machines = [self.members[ranks[0]].machine for ranks in self.nodes().values()]
        return len(set(machines)) < len(machines)

    def _turns(self, nodes: Sequence[int]) -> list[list[int]]:
        """Groups of nodes that measure at once."""
        return [[node] for node in nodes] if self.takes_turns else [list(nodes)]

    def _group_jobs(self, ranks: Sequence[int], job: dict[str, Any], tag: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The job for each rank of a group; only the first one's line counts for the group."""
        self._next += 1
        first = self.members[ranks[0]]
        host = self.contract.master_addr if first.node == 0 else first.address
        shared = {**job, "group": f"group-{self._next}", "store": [host, first.port], "size": len(ranks)}
        shared["limit"] = self.settings.limit_seconds
        return {
            rank: {**shared, "rank": place, "tag": {**tag, "first": place == 0}} for place, rank in enumerate(ranks)
        }

    # --- stages -----------------------------------------------------------------------------------------------------

    def measure_nodes(self, tests: Sequence[str], nodes: Mapping[int, list[int]], tag: dict[str, Any]) -> None:
        """One round of tests on `nodes`."""
        options = self.settings
        job = {
            "do": "node",
            "tests": [test for test in tests if test != "disk.write" or options.disk_bytes],
            "seconds": options.burst_seconds,
            "long": options.sustained_seconds,
            "disk_bytes": options.disk_bytes,
            "digest": True,
            "counters": True,
            "limit": options.limit_seconds,
        }
        for turn in self._turns(list(nodes)):
            at = {"at": self.seconds, **tag}
            answers = self.ask("node", {rank: {**job, "tag": at} for node in turn for rank in nodes[node]})
            for rank, answer in answers.items():
                self._keep(rank, answer.get("values", {}))
        if "local_all_reduce" in tests and self.contract.local_world_size > 1:
            for turn in self._turns([node for node in nodes if node in self.nodes()]):
                self._measure_inside(turn, nodes, tag)

    def _measure_inside(self, turn: Sequence[int], nodes: Mapping[int, list[int]], tag: dict[str, Any]) -> None:
        size = self.pair_bytes
        jobs: dict[int, dict[str, Any]] = {}
        for node in turn:
            job = {"do": "together", "operation": "all_reduce", "bytes": size, "samples": self.settings.samples}
            place = {"stage": "inside", "node": node, "bytes": size, "at": self.seconds}
            jobs |= self._group_jobs(nodes[node], job, {**place, **tag})
        for rank, answer in self.ask("node", jobs).items():
            if answer.get("times") and jobs[rank]["rank"] == 0:
                self._keep(rank, {"local_all_reduce": size / min(answer["times"]) / 1e9})

    def _keep(self, rank: int, values: Mapping[str, float]) -> None:
        for test, value in values.items():
            self._values.setdefault(test, {}).setdefault(str(rank), []).append(value)

    @property
    def pair_bytes(self) -> int:
        """Size of the all-reduce of a pair."""
        return self.settings.pair_bytes or ((256 << 20) if self.contract.device == "gpu" else (16 << 20))

    def screen_nodes(self) -> None:
        """Every node alone, several rounds; suspects become cases."""
        for number in range(self.settings.rounds):
            self._progress("node", number, self.settings.rounds)
            self.measure_nodes(list(rules.TESTS), self.nodes(), {"round": number})
        tests = {test: rules.screen(values, rules.TESTS[test].fail) for test, values in self._values.items()}
        screens = {test: found for test, found in tests.items() if found is not None}
        for test, rank in rules.worst_of_each_node(screens, self.contract.local_world_size):
            peers = rules.choose_peers(screens[test], screens[test].suspects)
            self._open_case(test, (rank,), [int(peer) for peer in peers])

    def screen_pairs(self) -> None:
        """Every pair of nodes, or matchings of many; slow nodes and links become cases."""
        nodes = self.nodes()
        most = None if len(nodes) <= _ALL_PAIRS else self.settings.matchings or None
        rounds = pairs.make_rounds(list(nodes), most, self.contract.seed)
        times: dict[pairs.Pair, float] = {}
        total = len(rounds) * self.settings.rounds
        for number in range(total):
            self._progress("pairs", number, total)
            for turn in self._turns_of_pairs(rounds[number % len(rounds)]):
                alive = self.nodes()
                turn = [pair for pair in turn if set(pair) <= set(alive)]
                for pair, seconds in self.measure_pairs(turn, {"round": number // len(rounds)}).items():
                    times[pair] = min(seconds, times.get(pair, seconds))
        if len(nodes) < 3 or not times:
            return
        found = pairs.explain(times, rules.TESTS["network"].fail)
        if len(found.causes) > rules.most_causes(len(nodes)):
            return
        slow = self.suspected
        touched = {node for cause in found.causes for node in cause} | slow
        good = [node for node in nodes if node not in touched]
        for cause in found.causes:
            if len(good) >= 2 and not slow & set(cause):
                self._open_case("network", cause, good)

    def _turns_of_pairs(self, matched: Sequence[pairs.Pair]) -> list[list[pairs.Pair]]:
        return [[pair] for pair in matched] if self.takes_turns else [list(matched)]

    def measure_pairs(self, matched: Sequence[pairs.Pair], tag: dict[str, Any]) -> dict[pairs.Pair, float]:
        """Seconds of an all-reduce of each pair of nodes, the best of five."""
        alive, size = self.nodes(), self.pair_bytes
        jobs: dict[int, dict[str, Any]] = {}
        firsts: dict[int, pairs.Pair] = {}
        for pair in matched:
            ranks = [rank for node in pair for rank in alive.get(node, [])]
            if len(ranks) < 2:
                continue
            firsts[ranks[0]] = pair
            job = {"do": "together", "operation": "all_reduce", "bytes": size, "samples": 5}
            place = {"stage": "pair", "pair": list(pair), "bytes": size, "at": self.seconds}
            jobs |= self._group_jobs(ranks, job, {**place, **tag})
        answers = self.ask("pairs", jobs)
        return {
            firsts[rank]: min(answer["times"])
            for rank, answer in answers.items()
            if rank in firsts and answer.get("times")
        }

    def measure_together(self, stages: Sequence[str], ranks: Sequence[int], number: int) -> None:
        """Collectives and training of all `ranks`; `number` counts the sets of nodes that did so."""
        options = self.settings
        if "collectives" in stages:
            calls = [(name, size) for size in options.sizes for name in _OPERATIONS]
            for step, (name, size) in enumerate(calls):
                self._progress("collectives", step, len(calls))
                job = {"do": "together", "operation": name, "bytes": size, "samples": options.samples}
                tag = {"stage": "all", "operation": name, "bytes": size, "set": number, "at": self.seconds}
                self.ask("collectives", self._group_jobs(ranks, job, {**tag, "ranks": list(ranks)}))
                self.confirm_if_due()
        if "training" in stages:
            self._progress("training", 0, 1)
            job = {"do": "train", "seconds": options.training_seconds}
            jobs = self._group_jobs(ranks, job, {"set": number, "at": self.seconds, "ranks": list(ranks)})
            for item in jobs.values():
                item["limit"] = options.limit_seconds + 2 * options.training_seconds
            self.ask("training", jobs)
            self.confirm_if_due()

    # --- confirmation -----------------------------------------------------------------------------------------------

    def _open_case(self, test: str, suspect: tuple[int, ...], peers: Sequence[int]) -> None:
        case = Case(len(self._cases), test, suspect, tuple(peers))
        self._cases.append(case)
        self._moments[case.number] = []
        say("case", case=case.number, test=test, suspect=list(suspect), peers=list(peers), at=self.seconds)

    def begin_confirmation(self) -> None:
        """Spread moments so that the first look is late enough for disturbances that last."""
        self._screened = self.seconds
        say("screened", at=self._screened, cases=len(self._cases))
        if self._cases:
            self._due = self.seconds + self._pause

    @property
    def _needed(self) -> float:
        """Seconds from the screen to the first look."""
        dips = [
            rules.longest_dip(series, rules.TESTS[self._cases[number].test].fail)
            for number, by_peer in self._dips.items()
            for series in by_peer.values()
        ]
        back = map(rules.way_back, self._moments.values())
        needed = rules.span_needed(max([self.settings.least_dip_seconds, *dips, *back]), len(self._cases))
        return max(0.0, needed - rules.read_recheck(self.settings.recheck).seconds)

    @property
    def _pause(self) -> float:
        return rules.next_pause(self.seconds - self._screened, self._moment, self._needed)

    def _confirmation(self, case: Case) -> rules.Confirmation:
        return rules.confirm(self._moments[case.number], len(self._cases), self._needed)

    def confirm_if_due(self) -> None:
        """Measure suspects and peers if it is time to."""
        if self.seconds >= self._due:
            self._confirm()
            self._due = self.seconds + self._pause if self._open else float("inf")

    def finish_confirmation(self) -> None:
        """Wait for the remaining moments, and look meanwhile how long disturbances of healthy peers last."""
        while self._due < float("inf"):
            if self.seconds - self._screened > self.settings.confirm_seconds:
                return
            self._progress("confirming", self._moment, max(rules.LOOKS))
            watch = max(_WATCH_SECONDS, self._needed / 100)
            if self._due - self.seconds > watch:
                self._watch_peers()
            time.sleep(min(watch, max(0.0, self._due - self.seconds)))
            self.confirm_if_due()

    def _watch_peers(self) -> None:
        for case in self._open:
            if case.test != "network":
                self._measure_case(case, case.peers, {"case": case.number})
                continue
            pair = (min(case.peers[:2]), max(case.peers[:2]))
            for seconds in self.measure_pairs([pair], {"case": case.number}).values():
                self._dips.setdefault(case.number, {}).setdefault(pair, []).append((self.seconds, 1 / seconds))

    def _measure_case(self, case: Case, ranks: Sequence[int], tag: dict[str, Any]) -> dict[int, float]:
        """The test of a case on the nodes of `ranks`; their values."""
        self._values = {}
        alive, wanted = self.nodes(), {self._node_of(rank) for rank in ranks}
        self.measure_nodes([case.test], {node: alive[node] for node in wanted if node in alive}, tag)
        found = {rank: some[0] for rank in ranks if (some := self._values.get(case.test, {}).get(str(rank)))}
        for rank in found.keys() & set(case.peers):
            self._dips.setdefault(case.number, {}).setdefault(rank, []).append((self.seconds, found[rank]))
        return found

    @property
    def _open(self) -> list[Case]:
        """Cases that another moment may decide."""
        if self._moment >= max(rules.LOOKS):
            return []
        alive = self.nodes()
        return [
            case
            for case in self._cases
            if self._confirmation(case).is_named is None
            and all((node if case.test == "network" else self._node_of(node)) in alive for node in case.suspect)
            and len(self._moments[case.number]) == self._moment
        ]

    @property
    def named(self) -> set[int]:
        """Nodes that the sign test named; of a link neither."""
        return {
            case.suspect[0] if case.test == "network" else self._node_of(case.suspect[0])
            for case in self._cases
            if len(case.suspect) == 1 and self._confirmation(case).is_named
        }

    @property
    def suspected(self) -> set[int]:
        """Nodes that are to be confirmed, alone or because of their network."""
        return {
            case.suspect[0] if case.test == "network" else self._node_of(case.suspect[0])
            for case in self._cases
            if len(case.suspect) == 1
        }

    def _confirm(self) -> None:
        for case in self._open:
            tag = {"case": case.number, "moment": self._moment}
            measure = self._confirm_network if case.test == "network" else self._confirm_node
            since, is_slow = self.seconds - self._screened, measure(case, tag)
            if is_slow is not None:
                self._moments[case.number].append((since, is_slow))
        self._moment += 1

    def _confirm_node(self, case: Case, tag: dict[str, Any]) -> bool | None:
        values = self._measure_case(case, [case.suspect[0], *case.peers], tag)
        return rules.is_slow(values.pop(case.suspect[0], None), list(values.values()), rules.TESTS[case.test].fail)

    def _confirm_network(self, case: Case, tag: dict[str, Any]) -> bool | None:
        chosen = random.Random(f"{self.contract.seed} {case.number} {self._moment}").sample(case.peers, 2)
        ends = [tuple(sorted((end, chosen[0]))) for end in case.suspect]
        own = [tuple(sorted(case.suspect))] if len(case.suspect) == 2 else ends
        others = ends if len(case.suspect) == 2 else [tuple(sorted(chosen))]
        found: dict[Any, float] = {}
        for pair in (*own, *others):
            found |= self.measure_pairs([(pair[0], pair[1])], tag)
        rates = [1 / found[pair] for pair in others if pair in found]
        mine = found.get(own[0])
        return rules.is_slow(None if mine is None else 1 / mine, rates, rules.TESTS["network"].fail)

    # --- the whole --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All stages."""
        asked = self.settings.stages
        say("scope", ranks=self.contract.world_size, answered=sorted(self.members), turns=self.takes_turns, at=0)
        for member in self.members.values():
            say("clock", rank=member.rank, offset=round(member.offset, 3))
        if "node" in asked:
            self.screen_nodes()
        if "pairs" in asked and len(self.nodes()) > 1:
            self.screen_pairs()
        self.begin_confirmation()
        together = [stage for stage in asked if stage in ("collectives", "training")]
        first = self._ranks(self.suspected)
        if together and len(first) > 1:
            self.measure_together(together, first, 0)
        self.finish_confirmation()
        last = self._ranks(self.named)
        if together and len(last) > 1 and last != first:
            self.measure_together(together, last, 1)
        if "soak" in asked:
            self._soak(together, last)
        say("end", at=self.seconds)

    def _ranks(self, without: Iterable[int]) -> list[int]:
        return [rank for ranks in self.nodes(without).values() for rank in ranks]

    def _soak(self, together: Sequence[str], ranks: Sequence[int]) -> None:
        begun, cycle = time.monotonic(), 0
        while time.monotonic() - begun < 3600 * self.settings.soak_hours:
            cycle += 1
            self._values = {}
            self._progress("soak", cycle, cycle)
            self.measure_nodes(list(rules.TESTS), self.nodes(), {"cycle": cycle})
            alive = [rank for rank in ranks if self._node_of(rank) in self.nodes()]
            if together and len(alive) > 1:
                self.measure_together(together, alive, 1 + cycle)

    def _progress(self, phase: str, step: int, steps: int) -> None:
        emit("phase", 0, phase=phase, step=step, steps=max(1, steps))

    def close(self) -> None:
        """Let all ranks go."""
        for member in self.members.values():
            with suppress(OSError, ValueError):
                member.stream.write('{"do":"end"}\n')
                member.stream.flush()


def main(contract: Contract) -> None:
    """Obey rank 0, and on rank 0 also give the orders. Raises PeerLostError if a rank fell silent: that ends the run
    of ranks that can do nothing any more, too."""
    settings = read_parameters(Settings, contract.parameters)
    place = (contract.master_addr, contract.master_port)
    if contract.rank:
        obey(contract, place)
        return
    emit("environment", 0, **machine_facts(), **code_facts())
    emit("phase", 0, phase="starting")
    listener = socket.create_server(("", contract.master_port), backlog=1024)
    own = threading.Thread(target=obey, args=(contract, ("127.0.0.1", contract.master_port)), daemon=True)
    own.start()
    coordinator = Coordinator(contract, settings)
    coordinator.gather(listener)
    coordinator.run()
    coordinator.close()
    own.join(timeout=_SLACK)
    if coordinator.silent:
        names = ", ".join(map(str, sorted(coordinator.silent)[:8]))
        raise PeerLostError(f"{len(coordinator.silent)} ranks do not answer: {names}", "The certificate names them.")
    emit(
        "result",
        0,
        outcome="completed",
        goal=None,
        wall_seconds=coordinator.seconds,
        training_seconds=None,
        timings={},
        synthetic=False,
        details={"answered": len(coordinator.members)},
    )
