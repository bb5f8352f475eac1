"""From the samples of a certificate to its document: states of nodes, findings, and the verdict about the cluster.

Pure. Sealing writes what follows from `certify`; verifying runs it again. Screen, confirmation and the fit of pairs are
`task_images.certify.rules`, which rank 0 asked while it measured.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, BinaryIO

from mlbench_cli.certify.expectations import ACCEPTED_SHARE, Figure, find_too_low, parse_expected
from mlbench_cli.certify.samples import Collective, Rates, Samples, Training, read_samples
from mlbench_cli.certify.words import State, Verdict
from mlbench_cli.model.run import Observation
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.text import counted, list_some
from task_images.certify import rules
from task_images.certify.rules import TESTS, Evidence, Suspect

STAGES = ("drift", "node", "pairs", "collectives", "training")
CLOCK_SECONDS = 1.0
_SLACK_SECONDS = 1.0  # between the clocks of rank 0 and of its agent
BLIND = 3.0  # a run that finds only shortfalls above so many margins cannot accept
_DISK = "disk.write"
_COPY = "copy.to_device"  # which only ranks with a GPU measure
_HARDWARE = ("cpu", "cpus", "memory", "gpu.name", "gpus", "network_cards")

Document = dict[str, Any]


def certify(spec: RunSpec, observation: Observation, logs: Mapping[int, Callable[[], BinaryIO]]) -> "Acceptance":
    """What a run of the task certify says of its nodes."""
    workers = {spec.unit_of(worker.rank): worker for worker in observation.workers}
    places = [None if number not in workers else workers[number].node for number in range(spec.workers)]
    names = [
        f"worker-{number}" if place is None or places.count(place) > 1 else place for number, place in enumerate(places)
    ]
    started = [number in workers and workers[number].started is not None for number in range(spec.workers)]
    dip = spec.parameters.get("least_dip_seconds")
    evidence = Evidence(spec.processes_per_worker, float(dip) if isinstance(dip, int | float) else rules.LEAST_DIP)
    samples = read_samples(logs, spec.world_size, evidence)
    expected = parse_expected(str(spec.parameters.get("expect") or ""))
    return Acceptance(samples, names, started, expected, observation.seconds)


def judge(samples: Samples, names: Sequence[str], started: Sequence[bool], expected: Sequence[Figure] = ()) -> Document:
    """The certificate of nodes with these `names`, in the order of their numbers; `started`: whether their workers did.
    `expected` are published figures of such a cluster."""
    acceptance = Acceptance(samples, names, started, expected)
    return acceptance.document(list(acceptance.find_contradictions()))


class Acceptance:
    """Samples of nodes, and what follows from them."""

    def __init__(
        self,
        samples: Samples,
        names: Sequence[str],
        started: Sequence[bool],
        expected: Sequence[Figure],
        seconds: float | None = None,
    ) -> None:
        """`seconds`: how long the ranks ran."""
        self.samples, self.evidence = samples, samples.evidence
        self.names, self.started, self.expected, self.seconds = names, started, expected, seconds
        absent = State.MISSING if any(started) else State.NOT_TESTED  # a run that did not start blames nobody
        self.states = [State.OK if has_started else absent for has_started in started]
        self.findings: list[Document] = []
        self.notes: list[str] = []  # why the cluster cannot be accepted
        self.rejected: list[str] = []  # why it is rejected
        # What was measured together before a soak repeats it: at last without nodes that fell silent.
        once = [row for row in samples.together if row.cycle is None]
        self.ranks = once[-1].ranks if once else ()
        together = [row for row in once if row.ranks == self.ranks]
        self.collectives = [row for row in together if isinstance(row, Collective)]
        self.trainings = [row for row in together if isinstance(row, Training)]

    def document(self, contradictions: Sequence[str] = ()) -> Document:
        """certificate.json. `contradictions`: what cannot be true in the evidence, which then proves nothing."""
        self._judge_presence()
        self._judge_results()
        self._judge_pairs()
        self._judge_groups()
        self._judge_suspects()
        self._judge_unsuspected()
        self._judge_flapping()
        self._judge_together()
        measured, fleet = self._measured(), self._fleet()
        verdict, reason = self._decide(measured, fleet)
        if contradictions:
            verdict, reason = Verdict.CANNOT_TELL, f"the evidence contradicts itself: {contradictions[0]}"
        tests, serials, evidence = self._relative(), self._serials(), self.evidence
        return {
            "verdict": str(verdict),
            "reason": reason,
            "is_partial": self.samples.ended is None,
            "contradictions": list(contradictions),
            "scope": {
                "asked": len(self.names),
                "answered": self._answered(),
                "ranks_per_node": evidence.per_node,
                "shares_machine": self.samples.scope is not None and self.samples.scope.turns,
                "measured": [stage for stage in STAGES if stage in measured],
                "not_tested": [stage for stage in STAGES if stage not in measured],
                "soak_cycles": self._soak_cycles(),
                "seconds": self.samples.ended,
            },
            "method": {
                "error": rules.ERROR,
                "looks": list(rules.LOOKS),
                "suspects": len(evidence.suspects),
                "measurements": sum(len(found.levels) for found in evidence.screens.values()),
                "longest_dip_seconds": round(evidence.longest_dip, 3),
                "least_dip_seconds": evidence.least_dip,
                "span_seconds": round(evidence.span, 3) if evidence.suspects else 0.0,
            },
            "nodes": [
                {
                    "node": name,
                    "state": str(self.states[number]),
                    "reasons": list(
                        dict.fromkeys(found["reason"] for found in self.findings if name in found["nodes"])
                    ),
                    "tests": tests.get(number, {}),
                    **({"serials": serials[number]} if number in serials else {}),
                }
                for number, name in enumerate(self.names)
            ],
            "hardware": self._hardware(),
            "fleet": fleet,
            "findings": self.findings,
            "drift": self._drift(),
            "delivers": self._delivered(),
        }

    def _find(self, reason: str, nodes: Sequence[int], state: State, summary: str, **facts: Any) -> None:
        """Add a finding about nodes; with none, about the cluster."""
        for number in nodes:
            self.states[number] = min(self.states[number], state, key=list(State).index)
        names = [self.names[number] for number in nodes]
        self.findings.append({"reason": reason, "nodes": names, "state": str(state), "summary": summary, **facts})

    def _reject(self, reason: str, summary: str, **facts: Any) -> None:
        self.rejected.append(summary)
        self._find(reason, [], State.OK, summary, **facts)

    # --- what cannot be true together -------------------------------------------------------------------------------

    def find_contradictions(self) -> Iterator[str]:
        """What cannot be true of these samples: they were copied, or edited after rank 0 had decided by them."""
        heard = {self.samples.node_of(rank) for rank in self.samples.inventories}
        for number in sorted(heard):
            if not self.started[number]:
                yield f"{self.names[number]} never started, and has measured"
        latest = max([row.at for _, _, row in self.samples.rows] + [self.samples.ended or 0.0])
        if self.seconds is not None and latest > self.seconds + _SLACK_SECONDS:
            yield f"samples were taken until {latest:.0f} s after the start of a run of {self.seconds:.0f} s"
        measured: dict[tuple[float, ...], int] = {}
        for rank in range(self.samples.ranks):
            own = [rates[rank,] for test, rates in sorted(self.evidence.rounds.items()) if (rank,) in rates]
            series = tuple(rate for rates in own for rate in rates)
            if len(series) > 1 and (other := measured.setdefault(series, rank)) != rank:
                yield f"ranks {other} and {rank} have measured the same to the last digit"
        for rank, stage in sorted(self.samples.silent.items()):
            # A soak repeats the stage node.
            if rank in self.ranks and stage in ("start", "node", "pairs") and not self.evidence.cycles:
                yield f"rank {rank} was measured with others after it had fallen silent"
        if self.evidence.screened:
            yield from self._contradict_cases()

    def _contradict_cases(self) -> Iterator[str]:
        """Rank 0 measured those again whom the samples make suspects, in order, and until it could decide."""
        cases = {(case.test, case.who): case for case in self.evidence.cases}
        suspects = {(suspect.test, suspect.who): suspect for suspect in self.evidence.suspects}
        if not {"node", "pairs"} & {*self.samples.silent.values()}:  # rank 0 has not read what came too late
            for test, who in sorted(suspects.keys() ^ cases.keys()):
                name = self._describe(test, who)
                if (test, who) in cases:
                    yield f"{name} is no suspect by its samples, but rank 0 measured it again"
                else:
                    yield f"{name} is a suspect by its samples, but rank 0 did not measure it again"
            for (test, who), case in cases.items():
                if (test, who) in suspects and {*case.peers} != {*suspects[test, who].peers}:
                    yield f"{self._describe(test, who)} was measured beside others than its peers"
        for suspect, found in zip(self.evidence.suspects, self.evidence.confirm(), strict=True):
            if (suspect.test, suspect.who) not in cases:
                continue
            number = self.evidence.cases.index(cases[suspect.test, suspect.who])
            name = self._describe(suspect.test, suspect.who)
            again, moments = self.evidence.again.get(number, ()), self.evidence.moments(number)
            last = max((sample.moment for sample in again if sample.moment is not None), default=-1)
            if last > len(moments):
                yield f"{name} lacks moments at which it was measured again"
            if found.is_named is False and len(moments) > found.of:
                yield f"{name} was measured again after it was cleared"

    def _describe(self, test: str, who: Sequence[int]) -> str:
        """ "n3 (memory)": a suspect; of another test than of the network, `who` is a rank."""
        nodes = who if test == "network" else [self.samples.node_of(rank) for rank in who]
        known = [self.names[node] if node < len(self.names) else f"node {node}" for node in nodes]
        return f"{' and '.join(known)} ({TESTS[test].title})"

    # --- what nodes said of themselves ------------------------------------------------------------------------------

    def _answered(self) -> int:
        """How many nodes came to the start."""
        late = {self.samples.node_of(rank) for rank, stage in self.samples.silent.items() if stage == "start"}
        return sum(has_started and number not in late for number, has_started in enumerate(self.started))

    def _judge_presence(self) -> None:
        heard = {self.samples.node_of(rank) for rank in self.samples.inventories}
        silent = {self.samples.node_of(rank): stage for rank, stage in self.samples.silent.items()}
        for number, name in enumerate(self.names):
            if self.states[number] is State.MISSING:
                self._find("no_answer", [number], State.MISSING, f"{name} never started")
            elif self.states[number] is State.OK and number in silent:
                self._find("no_answer", [number], State.FAILED, f"{name} fell silent in the stage {silent[number]}")
            elif self.states[number] is State.OK and number not in heard:
                state = State.FAILED if self.samples.scope is not None else State.NOT_TESTED
                self._find("no_answer", [number], state, f"{name} reported nothing")
        for rank, row in sorted(self.samples.inventories.items()):
            if row.error is not None:
                number = self.samples.node_of(rank)
                text = f"{self.names[number]}, rank {rank}: {row.error}"
                self._find("device_missing", [number], State.FAILED, text)

    def _judge_results(self) -> None:
        """Wrong results of ranks alone, measurements that failed, errors that the hardware counted."""
        of_rank: dict[int, list[tuple[int, Rates]]] = {}
        for rank, line, row in self.samples.rows:
            if row.unit is None:
                of_rank.setdefault(rank, []).append((line, row))
        told: set[int] = set()
        for rank, rows in sorted(of_rank.items()):
            number, log = self.samples.node_of(rank), f"logs/rank-{rank}.log"
            name = self.names[number]
            for line, row in [item for item in rows if item[1].digest not in (None, rules.DIGEST)][:1]:
                text, place = f"{name} computed a wrong product of integers", f"{log}#L{line}"
                self._find("wrong_result", [number], State.FAILED, text, evidence=place, digest=row.digest)
            if full := [(line, row.errors[_DISK]) for line, row in rows if _DISK in row.errors]:
                text = f"{name}: its disk could not be tested: {full[0][1]}"  # a full disk is no fault of the machine
                self._find("no_answer", [number], State.NOT_TESTED, text, evidence=f"{log}#L{full[0][0]}")
            if failed := [(line, row) for line, row in rows if row.errors.keys() - {_DISK} or row.error]:
                line, row = failed[0]
                state = State.FAILED if len(failed) * 2 > len(rows) else State.WATCH
                text = f"{name}: {len(failed)} of {len(rows)} measurements failed: "
                text += row.error or next(error for test, error in row.errors.items() if test != _DISK)
                self._find("no_answer", [number], state, text, evidence=f"{log}#L{line}")
            counts = [row.counters["ecc_uncorrected"] for _, row in rows if "ecc_uncorrected" in row.counters]
            if counts and counts[-1] > counts[0]:
                text = f"{name}: {counts[-1] - counts[0]} more uncorrected memory errors on rank {rank}"
                self._find("errors_counted", [number], State.FAILED, text)
            lost = [row.counters["links_down"] for _, row in rows if "links_down" in row.counters]
            if lost and lost[-1] > lost[0] and number not in told:
                told.add(number)  # its ranks count the same links
                text = f"{name}: a network link went down {counted(lost[-1] - lost[0], 'time')} during the run"
                self._find("errors_counted", [number], State.WATCH, text)
            is_told = any(row.counters.keys() & {"ecc_uncorrected", "hardware_slowdown"} for _, row in rows)
            if not is_told and any(_COPY in {*row.values, *row.errors} for _, row in rows):
                text = f"{name}: nvidia-smi does not tell errors and throttling of the GPU of rank {rank}"
                self._find("no_answer", [number], State.NOT_TESTED, text, evidence=log)
            slowed = [row.counters["hardware_slowdown"] for _, row in rows if "hardware_slowdown" in row.counters]
            if 2 * sum(slowed) > len(slowed):
                text = f"{name}: hardware slows the GPU of rank {rank} down"
                self._find("throttled", [number], State.WATCH, text)

    def _judge_pairs(self) -> None:
        """Pairs that failed, of nodes that were not lost. The first rank of a pair tells it, and may not be at fault: a
        node is, if most of its pairs failed."""
        lost = {self.samples.node_of(rank) for rank in self.samples.silent}
        tried: Counter[int] = Counter()
        failed: dict[tuple[int, int], list[tuple[str, str]]] = {}  # error, and where it is written
        for rank, line, row in self.samples.rows:
            if row.unit is not None and not lost & {*row.unit}:
                tried.update(row.unit)
                if error := row.error or next(iter(row.errors.values()), None):
                    failed.setdefault(row.unit, []).append((error, f"logs/rank-{rank}.log#L{line}"))
        count = Counter(node for unit, errors in failed.items() for node in unit for _ in errors)
        cut_off = sorted(node for node in count if 2 * count[node] > tried[node])
        if len(cut_off) > max(1, rules.CROWD * len(self.names)):
            names = list_some([self.names[node] for node in cut_off], 8)
            self.notes.append(f"most pairs of {names} failed: {next(iter(failed.values()))[0][0]}")
            cut_off = []
        for node in cut_off:
            error, place = next(errors[0] for unit, errors in failed.items() if node in unit)
            text = f"{self.names[node]}: {count[node]} of {tried[node]} pairs with others failed: {error}"
            self._find("no_answer", [node], State.FAILED, text, evidence=place)
        for unit, errors in failed.items():
            if not {*unit} & {*cut_off}:
                names = " and ".join(self.names[node] for node in unit)
                text = f"{names}: {counted(len(errors), 'measurement')} together failed: {errors[0][0]}"
                self._find("no_answer", unit, State.WATCH, text, evidence=errors[0][1])

    # --- who is slow ------------------------------------------------------------------------------------------------

    def _judge_groups(self) -> None:
        """So many slow nodes that they are no outliers, and groups of nodes with a slow boundary between them."""
        for test, found in self.evidence.screens.items():
            if found.is_crowd:
                self._tell_group(test, {self.samples.node_of(rank) for (rank,) in found.suspects})
        explanation = self.evidence.explanation
        if explanation is not None and not explanation.islands and (fast := self._find_fast_groups()):
            text = f"pairs of nodes inside {len(fast)} groups are faster than all others: a boundary may be slow"
            self.notes.append(text)
            groups = [[self.names[node] for node in sorted(group)] for group in fast]
            self._find("boundary_slow", [], State.OK, text, groups=groups)
        if explanation is not None and explanation.is_crowd:
            causes = explanation.causes
            if crowd := {cause[0] for cause in causes if len(cause) == 1}:
                self._tell_group("network", crowd)
            self.notes.append(f"{len(causes)} slow nodes or links are too many to name")
        if explanation is not None and explanation.islands:
            groups = [[self.names[node] for node in sorted(island)] for island in explanation.islands]
            text = f"{len(groups)} groups of nodes are fast inside and slow between"
            self._reject("boundary_slow", text, groups=groups)

    def _find_fast_groups(self) -> list[set[int]]:
        """Groups of nodes whose pairs inside are faster by the margin than all other pairs, if they have more than a
        quarter of the nodes. Matchings of many nodes show no boundary as a whole."""
        best = {(unit[0], unit[1]): max(rates) for unit, rates in self.evidence.rounds["network"].items()}
        ordered = sorted(best.values())
        gap, edge = max(((math.log(after / before), after) for before, after in pairwise(ordered)), default=(0.0, 0.0))
        if gap < rules.logarithm(TESTS["network"].fail):
            return []
        groups: list[set[int]] = []
        for pair in (pair for pair, rate in best.items() if rate >= edge):
            joined = [group for group in groups if group & {*pair}]
            groups = [group for group in groups if group not in joined]
            groups.append(set(pair).union(*joined))
        home = {node: number for number, group in enumerate(groups) for node in group}
        is_mixed = any(rate < edge and a in home and home[a] == home.get(b) for (a, b), rate in best.items())
        is_small = len(home) <= rules.CROWD * len({node for pair in best for node in pair})
        return [] if len(groups) < 2 or is_mixed or is_small else groups

    def _tell_group(self, test: str, slow: set[int]) -> None:
        key = self._splitting_key(slow)
        text = f"{len(slow)} of {len(self.names)} nodes are slow in {TESTS[test].title}: two groups, no outliers"
        if len(slow) == len(self.names):
            text = f"every node has fast and slow ranks in {TESTS[test].title}"
        if key is not None:
            text += f"; they are the nodes with {key[0]} {key[1]}"
        self.notes.append(text)
        groups = [[self.names[number] for number in sorted(slow)]]
        self._find(TESTS[test].reason, [], State.OK, text, test=test, groups=groups, key=key and list(key))

    def _inventories(self) -> dict[int, Mapping[str, str]]:
        """Node -> what its first rank says it is."""
        found: dict[int, Mapping[str, str]] = {}
        for rank, row in sorted(self.samples.inventories.items()):
            found.setdefault(self.samples.node_of(rank), row.keys)
        return found

    def _serials(self) -> dict[int, list[str]]:
        """Node -> the serial numbers of its GPUs."""
        found: dict[int, list[str]] = {}
        for rank, row in sorted(self.samples.inventories.items()):
            if row.serial is not None:
                found.setdefault(self.samples.node_of(rank), []).append(row.serial)
        return found

    def _splitting_key(self, slow: set[int]) -> tuple[str, str] | None:
        """The key and value of the inventory that best separates `slow` nodes: Fisher's exact test, corrected for the
        number of ways in which keys divide the nodes."""
        kept = self._inventories()
        ranked, ways = [], set()
        for key, value in {item for keys in kept.values() for item in keys.items()}:
            having = frozenset(number for number, keys in kept.items() if keys.get(key) == value)
            if len(having) < len(kept):
                ranked.append((_fisher(len(having & slow), len(slow), len(having), len(kept)), key, value))
                ways.add(frozenset((having, frozenset(kept.keys() - having))))
        chance, key, value = min(ranked, default=(1.0, "", ""))
        return (key, value) if chance * len(ways) <= 0.05 and ranked else None

    def _judge_suspects(self) -> None:
        """What the sign test over fresh data says of every suspect of the screen."""
        for suspect, found in zip(self.evidence.suspects, self.evidence.confirm(), strict=True):
            test, is_link, short = TESTS[suspect.test], len(suspect.who) == 2, -math.expm1(-suspect.short)
            nodes = self.evidence.nodes_of(suspect)
            names = " and ".join(self.names[number] for number in nodes)
            about, detail = names, f"{100 * short:.1f} % below its peers in {test.title}"
            if is_link:
                about, detail = f"the link between {names}", f"{100 * short:.1f} % slower than the others"
            state, count = State.WATCH, f"{found.slow} of {found.of} moments"
            is_bad = any(self.states[number].is_bad for number in nodes)
            if found.is_named:
                state = State.WATCH if is_link else State.SLOW
                detail += f"; confirmed in {count} over {found.seconds:.0f} s"
                if is_link and not is_bad:
                    self.notes.append(f"{about} is slow, and either end may be at fault")
            elif found.is_named is False:
                if short < test.warn or found.slow * 2 < found.of:
                    continue  # fresh data does not show it
                detail += f"; {count} are too few to blame it"
            else:
                again = f"slow in {count} over {found.seconds:.0f} s, of {self.evidence.span:.0f} s that blame it"
                detail += f"; {again if found.of else 'it was not measured again'}"
                if not is_bad:
                    self.notes.append(f"{about} could be neither cleared nor named")
            text = f"{about}: {detail}"
            reason = "link_slow" if is_link else test.reason
            self._find(reason, nodes, state, text, **self._facts(suspect, found))

    def _facts(self, suspect: Suspect, found: rules.Confirmation) -> Document:
        test = TESTS[suspect.test]
        facts: Document = {
            "test": suspect.test,
            "unit": test.unit,
            "shortfall": _round(-math.expm1(-suspect.short)),
            "margin": {"warn": test.warn, "fail": test.fail},
            "confirmed": {
                "slow": found.slow,
                "of": found.of,
                "level": _round(found.level),
                "span_seconds": round(found.seconds, 3),
                "needed_seconds": round(self.evidence.span, 3),
            },
        }
        if suspect.test != "network":
            screen, rank = self.evidence.screens[suspect.test], suspect.who[0]
            facts["rank"], facts["evidence"] = rank, f"logs/rank-{rank}.log"
            facts["value"] = _round(math.exp(screen.levels[suspect.who]))
            facts["peers"] = {"n": len(screen.levels) - 1, "median": _round(math.exp(screen.median))}
        return facts

    def _judge_unsuspected(self) -> None:
        """Nodes beyond the warning, but not beyond the screen."""
        suspected = {(suspect.test, suspect.who) for suspect in self.evidence.suspects}
        for test, found in self.evidence.screens.items():
            margin = TESTS[test]
            limit = max(rules.logarithm(margin.warn), rules.SCREEN_DEVIATIONS * found.scale)
            for unit in sorted(found.levels, key=found.levels.__getitem__) if not found.is_crowd else ():
                if found.short(unit) >= limit and (test, unit) not in suspected:
                    number, short = self.samples.node_of(unit[0]), -math.expm1(-found.short(unit))
                    text = f"{self.names[number]}: {100 * short:.1f} % below its peers in {margin.title}"
                    self._find(margin.reason, [number], State.WATCH, text, test=test, shortfall=_round(short))

    def _judge_flapping(self) -> None:
        """Nodes that are slow in a part of the cycles of a soak."""
        for test, by_unit in self.evidence.cycles.items():
            count = statistics.mode(map(len, by_unit.values()))  # the last cycle may have been cut short
            whole = [rates[:count] for rates in by_unit.values() if len(rates) >= count]
            if count < 4 or len(whole) < rules.LEAST_FLEET or test == "network":
                continue
            limits = [(1 - TESTS[test].fail) * statistics.median(rates) for rates in zip(*whole, strict=True)]
            slow = {
                rank: sum(rate < limit for rate, limit in zip(rates, limits, strict=False))
                for (rank,), rates in by_unit.items()
            }
            flapping = [rank for rank, cycles in slow.items() if cycles >= max(3, count // 4)]
            for rank in flapping if len(flapping) <= rules.CROWD * len(by_unit) else ():  # else machines are busy
                number = self.samples.node_of(rank)
                if not self.states[number].is_bad:
                    text = f"{self.names[number]}: slow in {TESTS[test].title} in {slow[rank]} of {count} cycles"
                    self._find("flapping", [number], State.WATCH, text, test=test)
                    if 2 * slow[rank] > count:  # no sign test has looked at them
                        self.notes.append(text)

    # --- all together -----------------------------------------------------------------------------------------------

    def _judge_together(self) -> None:
        """What failed, gave wrong sums, took the slow path, or misses a published figure. That names no node."""
        for failed in self.samples.failed:
            if not self.samples.silent.keys() & {*failed.ranks}:  # else a node is named for it
                self.notes.append(f"{failed.operation or 'training'} failed: {failed.error}")
        every = [row for row in self.samples.together if isinstance(row, Collective)]
        for operation in sorted({row.operation for row in every if not row.right}):
            self._reject("wrong_result", f"{operation} gives wrong sums")
        if unknown := sorted({row.operation for row in every if row.transport is None}):
            self.notes.append(f"which network carried {list_some(unknown, 8)} is not known")
        has_infiniband = any(keys.get("infiniband") for keys in self._inventories().values())
        for operation in sorted({row.operation for row in every if row.transport == "Socket" and has_infiniband}):
            self._reject("transport_fallback", f"{operation} goes over TCP although nodes have InfiniBand")
        for known in self.expected:
            what = f"{known.operation} of {known.bytes} bytes"
            if problem := find_too_low(known):  # the command refuses it; `mlbench run --set expect=...` does not
                self.notes.append(f"the expected {what}: {problem}")
            elif not (reached := [row for row in self.collectives if self._is_of(known, row)]):
                self.notes.append(f"{what} on {known.nodes} nodes was not measured")
            elif (share := _bandwidth(reached[0]) / known.value) < ACCEPTED_SHARE:
                text = f"{what} reaches {100 * share:.0f} % of the {known.value:g} GB/s of {known.source}"
                self._reject("below_expected", text)

    def _is_of(self, known: Figure, row: Collective) -> bool:
        nodes = {self.samples.node_of(rank) for rank in row.ranks}
        return (known.operation, known.bytes, known.nodes) == (row.operation, row.bytes, len(nodes))

    def _delivered(self) -> Document | None:
        """What the nodes do together."""
        if not self.ranks:
            return None
        collectives = []
        for row in self.collectives:
            expected = next((known for known in self.expected if self._is_of(known, row)), None)
            collectives.append(
                {
                    "operation": row.operation,
                    "bytes": row.bytes,
                    "seconds": _round(statistics.median(row.times)),
                    "busbw_gbps": _round(_bandwidth(row)),
                    "spread": _round(max(row.times) / min(row.times)),
                    "transport": row.transport,
                    "expected": expected
                    and {
                        "value": expected.value,
                        "source": expected.source,
                        "share": _round(_bandwidth(row) / expected.value),
                    },
                }
            )
        return {
            "nodes": self._names_together(),
            "ranks": len(self.ranks),
            "collectives": collectives,
            "training": _training(self.trainings[0]) if self.trainings else None,
        }

    def _names_together(self) -> list[str]:
        return sorted({self.names[self.samples.node_of(rank)] for rank in self.ranks})

    # --- the cluster ------------------------------------------------------------------------------------------------

    def _fleet(self) -> dict[str, Document]:
        """Test -> the median of the fleet, its spread, and the smallest shortfall that would have been found."""
        found: dict[str, Document] = {}
        for test, screen in self.evidence.screens.items():
            repeats = sum(map(len, self.evidence.rounds[test].values())) / len(screen.levels)
            least = rules.smallest_shortfall(TESTS[test].fail, screen.scale, screen.noise, repeats, screen.lag)
            found[test] = {
                "median": _round(math.exp(screen.median)),
                "scale": _round(screen.scale),
                "units": len(screen.levels),
                "smallest_shortfall": _round(least),
            }
        if (explanation := self.evidence.explanation) is not None:
            pairs, levels = self.evidence.rounds["network"], explanation.levels
            found["network"] = {
                "median": _round(math.exp(explanation.typical)),
                "scale": None,
                "units": len(pairs),
                "smallest_shortfall": None,
            }
            if levels:  # else a slow boundary hides them
                scale, partners = rules.spread(levels.values()), 2 * len(pairs) / len(levels)
                noise = math.sqrt(2) * rules.deviation(pairs.values())  # a suspect's pair is compared with one other
                least = rules.smallest_shortfall(TESTS["network"].fail, scale, noise, partners)
                found["network"] |= {"scale": _round(scale), "smallest_shortfall": _round(least)}
        margins = {test: TESTS[test]._asdict() for test in found}
        return {test: {**margins[test], **facts} for test, facts in found.items()}

    def _relative(self) -> dict[int, dict[str, float]]:
        """Node -> test -> the level of its worst unit, relative to the fleet's median."""
        found: dict[int, dict[str, float]] = {}
        for test, screen in self.evidence.screens.items():
            for unit in screen.levels:
                row, value = found.setdefault(self.samples.node_of(unit[0]), {}), math.expm1(-screen.short(unit))
                row[test] = min(_round(value), row.get(test, math.inf))
        if self.evidence.explanation is not None:
            for node, level in self.evidence.explanation.levels.items():
                found.setdefault(node, {})["network"] = _round(math.expm1(-level))
        return found

    def _drift(self) -> list[Document]:
        """Keys of the inventory in which nodes differ, with the nodes of each rarer value."""
        kept, found = self._inventories(), []
        for key in sorted({key for keys in kept.values() for key in keys}):
            usual, others = _most_common(keys.get(key, "") for keys in kept.values()), dict[str, list[str]]()
            for number, keys in kept.items():
                if keys.get(key, "") != usual:
                    others.setdefault(keys.get(key, ""), []).append(self.names[number])
            if others:
                found.append({"key": key, "usual": usual, "others": others})
        late: dict[str, list[str]] = {}
        for rank, seconds in self.samples.scope.clocks.items() if self.samples.scope is not None else ():
            if abs(seconds) > CLOCK_SECONDS and rank < self.samples.ranks and rank % self.evidence.per_node == 0:
                late.setdefault(f"{seconds:+.1f} s", []).append(self.names[self.samples.node_of(rank)])
        if late:
            found.append({"key": "clock", "usual": "as rank 0", "others": late})
        return found

    def _hardware(self) -> dict[str, str]:
        """The usual processor, memory and devices of the fleet."""
        rows = [row.keys for row in self.samples.inventories.values()]
        values = {key: [row[key] for row in rows if key in row] for key in _HARDWARE}
        return {key: _most_common(some) for key, some in values.items() if some}

    def _measured(self) -> set[str]:
        """The stages that were measured. A node that was compared with no others, or missed a stage, was not tested."""
        compared: dict[str, set[int]] = {}
        for screen in self.evidence.screens.values():
            compared.setdefault("node", set()).update(self.samples.node_of(unit[0]) for unit in screen.levels)
        if self.evidence.explanation is not None:
            compared["pairs"] = {node for pair in self.evidence.rounds["network"] for node in pair}
        if compared and self.ranks:
            compared["together"] = {self.samples.node_of(rank) for rank in self.ranks}
        for number, state in enumerate(self.states):
            if state is State.OK and not (compared and all(number in nodes for nodes in compared.values())):
                self.states[number] = State.NOT_TESTED
        found = {"drift"} if self.samples.inventories else set()
        found |= {"pairs" if test == "network" else "node" for test in self.evidence.rounds}
        return found | ({"collectives"} if self.collectives else set()) | ({"training"} if self.trainings else set())

    def _soak_cycles(self) -> int:
        return max((len(some) for rates in self.evidence.cycles.values() for some in rates.values()), default=0)

    def _decide(self, measured: set[str], fleet: Mapping[str, Document]) -> tuple[Verdict, str]:
        """The verdict and its reason in one sentence."""
        bad = [name for name, state in zip(self.names, self.states, strict=True) if state.is_bad]
        untested = [name for name, state in zip(self.names, self.states, strict=True) if state is State.NOT_TESTED]
        missing = [stage for stage in STAGES if stage not in measured]
        blind = [row for row in fleet.values() if (row["smallest_shortfall"] or 0.0) > BLIND * row["fail"]]
        if self.rejected:
            return Verdict.REJECTED, self.rejected[0]
        if len(bad) > max(1, rules.CROWD * len(self.names)):
            return Verdict.REJECTED, f"{len(bad)} of {len(self.names)} nodes are bad: {list_some(bad, 8)}"
        if not any(self.started):
            return Verdict.CANNOT_TELL, "no node started"
        if self.samples.ended is None:
            when = " while suspects were measured again"
            if missing:
                when = f"; not measured: {list_some(missing, 8)}"
            elif cycles := self._soak_cycles():
                when = f" in the soak, after {counted(cycles, 'cycle')}"
            return Verdict.CANNOT_TELL, f"the measurement was cut short{when}"
        if (count := self._answered()) < rules.LEAST_FLEET:
            text = f"{count} nodes are no fleet to compare a node with: {rules.LEAST_FLEET} are needed"
            return Verdict.CANNOT_TELL, text
        if missing or untested:
            return Verdict.CANNOT_TELL, f"not tested: {list_some(missing or untested, 8)}"
        if self.notes:
            return Verdict.CANNOT_TELL, self.notes[0]
        if blind:
            worst = max(blind, key=lambda row: row["smallest_shortfall"] / row["fail"])
            return Verdict.CANNOT_TELL, (
                f"the machines are too busy: in {worst['title']} only a node that is "
                f"{100 * worst['smallest_shortfall']:.0f} % slower than its peers would have been found"
            )
        if bad and set(bad) & set(self._names_together()):
            return Verdict.CANNOT_TELL, f"the others were not measured without {list_some(bad, 8)}"
        if bad:
            return Verdict.ACCEPTED_WITHOUT, f"without {list_some(bad, 8)}"
        return Verdict.ACCEPTED, f"no node of {len(self.names)} is to be returned"


def _bandwidth(row: Collective) -> float:
    """GB/s, as nccl-tests define the bus bandwidth."""
    size, factor = len(row.ranks), 2 if row.operation == "all_reduce" else 1
    return row.bytes / statistics.median(row.times) / 1e9 * factor * (size - 1) / size


def _training(row: Training) -> Document:
    steps = sorted(row.steps[min(2, len(row.steps) - 1) :])  # the first ones allocate memory
    median = statistics.median(steps)
    return {
        "steps": len(row.steps),
        "samples_per_second": _round(row.batch * len(row.ranks) / median),
        "p99_over_p50": _round(steps[math.ceil(0.99 * len(steps)) - 1] / median),
        "goodput": _round(min(1.0, median * len(row.steps) / row.wall)),
        "checkpoint_write_mbps": _round(row.bytes / row.write / 1e6),
        "checkpoint_read_mbps": _round(row.bytes / row.read / 1e6),
    }


def _fisher(both: int, slow: int, having: int, total: int) -> float:
    """The probability that at least `both` of `slow` nodes have a value that `having` of `total` nodes have."""
    most, ways = min(slow, having), math.comb(total, slow)
    return sum(math.comb(having, k) * math.comb(total - having, slow - k) for k in range(both, most + 1)) / ways


def _most_common(values: Iterable[str]) -> str:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def _round(value: float) -> float:
    """Six significant digits: the last ones of logarithms differ between platforms."""
    return float(f"{value:.6g}") + 0.0  # and no negative zero
