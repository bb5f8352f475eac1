"""From the samples of a certificate to its document: states of nodes, findings, and the verdict about the cluster.

Pure. Sealing writes what `judge` returns; verifying runs it again: screen, confirmation and the fit of pairs. The
recorded cases say only who was measured again; who was a suspect follows from the samples of the screen.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlbench_cli.certify.samples import Case, NodeSample, Samples, Together
from mlbench_cli.certify.words import State, Verdict
from task_images.certify import pairs, rules
from task_images.certify.rules import TESTS

STAGES = ("drift", "node", "pairs", "collectives", "training")
ACCEPTED_SHARE = 0.90  # of a published figure
CLOCK_SECONDS = 1.0
BLIND = 3.0  # a run that finds only shortfalls above so many margins cannot accept
_HARDWARE = ("cpu", "cpus", "memory", "gpu.name", "gpus", "network_cards")
_SCREEN_QUANTILE, _LOOK_QUANTILE = 1.645, 1.55  # 95 %: of one normal number, and of each of about 16 of 20


Document = dict[str, Any]
_NOBODY = rules.Recheck()


def judge(
    samples: Samples,
    names: Sequence[str],
    started: Sequence[bool],
    expected: Sequence[Mapping[str, Any]] = (),
    *,
    least_dip: float = rules.LEAST_DIP,
    recheck: rules.Recheck = _NOBODY,
) -> Document:
    """The certificate of nodes with these `names`, in the order of their numbers; `started`: whether their workers did.

    `expected` are published figures of such a cluster. `least_dip` is the mean length of disturbances to outlast, in
    seconds. `recheck`: who was suspected before.
    """
    return _Judge(samples, names, started, expected, least_dip, recheck).document()


class _Judge:
    def __init__(
        self,
        samples: Samples,
        names: Sequence[str],
        started: Sequence[bool],
        expected: Sequence[Mapping[str, Any]],
        least_dip: float,
        recheck: rules.Recheck,
    ) -> None:
        self.samples, self.names, self.expected, self.least_dip = samples, names, expected, least_dip
        self.recheck, self.started = recheck, started
        absent = State.MISSING if any(started) else State.NOT_TESTED  # a run that did not start blames nobody
        self.states = {number: State.OK if started[number] else absent for number in range(len(names))}
        self.findings: list[Document] = []
        self.notes: list[str] = []  # why the cluster cannot be accepted
        self.screens: dict[str, rules.Screen] = {}
        self.fleet: dict[str, Document] = {}
        self.explained: pairs.Explanation | None = None
        self.dip = least_dip
        self.rejected: list[str] = []

    def _name_of(self, test: str, unit: int) -> str:
        return self.names[unit if test == "network" else self.node_of(unit)]

    def node_of(self, rank: int) -> int:
        return rank // self.samples.per_node

    def document(self) -> Document:
        self._judge_presence()
        self._judge_results()
        self._screen_nodes()
        self._explain_pairs()
        suspects = self._suspects()
        self._confirm(suspects)
        self._watch_flapping()
        drift = self._find_drift()
        delivers = self._delivered()
        measured = self._measured(delivers)
        verdict, reason = self._decide(measured)
        tests = self._relative()
        return {
            "verdict": str(verdict),
            "reason": reason,
            "is_partial": self.samples.ended is None,
            "scope": {
                "asked": len(self.names),
                "answered": len(self._answered()),
                "ranks_per_node": self.samples.per_node,
                "shares_machine": self.samples.shares_machine,
                "measured": [stage for stage in STAGES if stage in measured],
                "not_tested": [stage for stage in STAGES if stage not in measured],
                "seconds": self.samples.ended,
            },
            "method": {
                "error": rules.ERROR,
                "looks": list(rules.LOOKS),
                "suspects": len(suspects),
                "measurements": sum(len(found.levels) for found in self.screens.values()),
                "longest_dip_seconds": round(self.dip, 3),
                "least_dip_seconds": self.least_dip,
                "span_seconds": round(rules.span_needed(self.dip, len(suspects)), 3) if suspects else 0.0,
            },
            "nodes": [
                {
                    "node": name,
                    "state": str(self.states[number]),
                    "reasons": list(
                        dict.fromkeys(found["reason"] for found in self.findings if name in found["nodes"])
                    ),
                    "tests": tests.get(number, {}),
                }
                for number, name in enumerate(self.names)
            ],
            "hardware": self._hardware(),
            "fleet": self.fleet,
            "findings": self.findings,
            "drift": drift,
            "delivers": delivers,
        }

    # --- findings ---------------------------------------------------------------------------------------------------

    def _find(self, reason: str, nodes: Sequence[int], state: State, summary: str, **facts: Any) -> None:
        for number in nodes:
            order = list(State)
            self.states[number] = min(self.states[number], state, key=order.index)
        names = [self.names[number] for number in nodes]
        self.findings.append({"reason": reason, "nodes": names, "state": str(state), "summary": summary, **facts})

    def _answered(self) -> set[int]:
        """The nodes that came to the start."""
        late = {self.node_of(rank) for rank, stage in self.samples.silent.items() if stage == "start"}
        return {number for number, has_started in enumerate(self.started) if has_started} - late

    def _judge_presence(self) -> None:
        heard = {self.node_of(rank) for rank in self.samples.inventories}
        silent = {self.node_of(rank): stage for rank, stage in self.samples.silent.items()}
        for number, name in enumerate(self.names):
            if self.states[number] is State.NOT_TESTED:
                continue
            if self.states[number] is State.MISSING:
                self._find("no_answer", [number], State.MISSING, f"{name} never started")
            elif number in silent:
                self._find("no_answer", [number], State.FAILED, f"{name} fell silent in the stage {silent[number]}")
            elif number not in heard:
                state = State.FAILED if self.samples.has_scope else State.NOT_TESTED
                self._find("no_answer", [number], state, f"{name} reported nothing")
        for rank, problem in sorted(self.samples.problems.items()):
            number = self.node_of(rank)
            self._find("device_missing", [number], State.FAILED, f"{self.names[number]}, rank {rank}: {problem}")

    def _judge_results(self) -> None:
        seen: set[int] = set()
        failed: dict[int, list[NodeSample]] = {}
        for sample in self.samples.nodes:
            number = self.node_of(sample.rank)
            if number >= len(self.names):
                continue
            if sample.digest not in (None, rules.DIGEST) and number not in seen:
                seen.add(number)
                self._find(
                    "wrong_result",
                    [number],
                    State.FAILED,
                    f"{self.names[number]} computed a wrong product of integers",
                    evidence=f"logs/rank-{sample.rank}.log#L{sample.line}",
                    digest=str(sample.digest)[:64],
                )
            if sample.errors:
                failed.setdefault(sample.rank, []).append(sample)
        for rank, errors in sorted(failed.items()):
            number, count = self.node_of(rank), sum(sample.rank == rank for sample in self.samples.nodes)
            state = State.FAILED if len(errors) * 2 > count else State.WATCH
            text = next(iter(errors[0].errors.values()))
            self._find(
                "no_answer",
                [number],
                state,
                f"{self.names[number]}: {len(errors)} of {count} measurements failed: {text}",
                evidence=f"logs/rank-{rank}.log#L{errors[0].line}",
            )
        for rank, rows in sorted(self.samples.counters.items()):
            number = self.node_of(rank)
            counts = [row["ecc_uncorrected"] for row in rows if "ecc_uncorrected" in row]
            if counts and counts[-1] > counts[0]:
                more = counts[-1] - counts[0]
                text = f"{self.names[number]}: {more} more uncorrected memory errors on rank {rank}"
                self._find("errors_counted", [number], State.FAILED, text)
            slowed = sum(row.get("hardware_slowdown", 0) for row in rows)
            if 2 * slowed > len(rows):
                text = f"{self.names[number]}: hardware slows the GPU of rank {rank} down"
                self._find("throttled", [number], State.WATCH, text)

    # --- screen -----------------------------------------------------------------------------------------------------

    def _values(self, *, cycle: bool = False) -> dict[str, dict[str, list[float]]]:
        values: dict[str, dict[str, list[float]]] = {}
        for sample in self.samples.nodes:
            if (sample.cycle if cycle else sample.round) is not None and self.node_of(sample.rank) < len(self.names):
                for test, value in sample.values.items():
                    values.setdefault(test, {}).setdefault(str(sample.rank), []).append(value)
        return values

    def _screen_nodes(self) -> None:
        for test, by_unit in self._values().items():
            found, margin = rules.screen(by_unit, TESTS[test].fail), TESTS[test]
            if found is None:
                continue
            self.screens[test] = found
            self.fleet[test] = {
                "title": margin.title,
                "unit": margin.unit,
                "median": _round(math.exp(found.median)),
                "scale": _round(found.scale),
                "units": len(found.levels),
                "warn": margin.warn,
                "fail": margin.fail,
                "source": margin.source,
                "smallest_shortfall": _round(_smallest_shortfall(found, by_unit, margin.fail)),
            }

    def _explain_pairs(self) -> None:
        times: dict[pairs.Pair, float] = {}
        for sample in self.samples.pairs:
            if sample.case is None and max(sample.pair) < len(self.names):
                times[sample.pair] = min(sample.seconds, times.get(sample.pair, sample.seconds))
        if len({node for pair in times for node in pair}) < 3:
            return
        margin = TESTS["network"]
        self.explained = found = pairs.explain(times, margin.fail)
        self.fleet["network"] = {
            "title": margin.title,
            "unit": "s",
            "median": _round(math.exp(found.typical)),
            "scale": None,
            "units": len(times),
            "warn": margin.warn,
            "fail": margin.fail,
            "source": margin.source,
            "smallest_shortfall": None,
        }
        if found.islands:
            groups = [[self.names[node] for node in sorted(island)] for island in found.islands]
            text = f"{len(groups)} groups of nodes are fast inside and slow between"
            self.findings.append(
                {"reason": "boundary_slow", "nodes": [], "state": "ok", "summary": text, "groups": groups}
            )
            self.rejected.append(text)

    def _suspects(self) -> list[tuple[str, tuple[int, ...], float]]:
        """(test, ranks or nodes, shortfall as a logarithm) of what is to be confirmed: each suspected node in its worst
        test, and the network where it touches none of them."""
        worst = rules.worst_of_each_node(self.screens, self.samples.per_node)
        suspects: list[tuple[str, tuple[int, ...], float]] = []
        for test, rank in worst:
            found = self.screens[test]
            suspects.append((test, (rank,), found.median - found.levels[str(rank)]))
        for test, found in self.screens.items():
            if len(found.suspects) > rules.CROWD * len(found.levels):
                self._tell_group(test, {self.node_of(int(unit)) for unit in found.suspects})
        if self.explained is not None:
            causes = self.explained.causes
            if len(causes) > rules.most_causes(len(self.names)):
                if crowd := {cause[0] for cause in causes if len(cause) == 1}:
                    self._tell_group("network", crowd)
                self.notes.append(f"{len(causes)} slow nodes or links are too many to name")
            else:
                slow = {self.node_of(rank) for _, rank in worst}
                suspects += [("network", cause, effect) for cause, effect in causes.items() if not slow & set(cause)]
        return suspects

    def _tell_group(self, test: str, slow: set[int]) -> None:
        key = self._splitting_key(slow)
        text = f"{len(slow)} of {len(self.names)} nodes are slow in {TESTS[test].title}: two groups, no outliers"
        if key is not None:
            text += f"; they are the nodes with {key[0]} {key[1]}"
        self.notes.append(text)
        self.findings.append(
            {
                "reason": TESTS[test].reason,
                "nodes": [],
                "state": "ok",
                "summary": text,
                "test": test,
                "groups": [[self.names[number] for number in sorted(slow)]],
                "key": None if key is None else list(key),
            }
        )

    def _splitting_key(self, slow: set[int]) -> tuple[str, str] | None:
        """The key and value of the inventory that best separates `slow` nodes: Fisher's exact test, corrected for the
        number of keys."""
        kept = {self.node_of(rank): keys for rank, keys in self.samples.inventories.items()}
        keys = {(key, value) for keys in kept.values() for key, value in keys.items()}
        ranked = []
        for key, value in keys:
            having = {number for number, row in kept.items() if row.get(key) == value}
            if having and len(having) < len(kept):
                ranked.append((_fisher(len(having & slow), len(slow), len(having), len(kept)), key, value))
        best = min(ranked, default=None)
        return (best[1], best[2]) if best is not None and best[0] * len(ranked) <= 0.05 else None

    # --- confirmation -----------------------------------------------------------------------------------------------

    def _confirm(self, suspects: Sequence[tuple[str, tuple[int, ...], float]]) -> None:
        cases = {(case.test, case.suspect): case for case in self.samples.cases}
        screened = self.samples.screened or 0.0
        series = {
            (test, who): [(at - screened, is_slow) for at, is_slow in self._moments(cases.get((test, who)))]
            for test, who, _ in suspects
        }
        back = map(rules.way_back, series.values())
        self.dip = max([self.least_dip, *self._dips(), *back])
        needed = rules.span_needed(self.dip, len(suspects))
        for test, who, effect in suspects:
            moments = series[(test, who)]
            if [self._name_of(test, unit) for unit in who] == [self.recheck.node] and test in self.recheck.tests:
                moments = [(since + self.recheck.seconds, is_slow) for since, is_slow in moments]
            found = rules.confirm(moments, len(suspects), needed)
            span = moments[found.of - 1][0] if found.of else 0.0
            self._conclude(test, who, effect, found, span, needed)
        self._warn_unsuspected({(test, who) for test, who, _ in suspects})

    def _conclude(
        self, test: str, who: tuple[int, ...], effect: float, found: rules.Confirmation, span: float, needed: float
    ) -> None:
        margin, is_network = TESTS[test], test == "network"
        nodes = list(who) if is_network else [self.node_of(who[0])]
        names = " and ".join(self.names[number] for number in nodes)
        reason = "link_slow" if len(who) == 2 else margin.reason
        short = -math.expm1(-effect)
        if len(who) == 2:
            text = f"the link between {names} is {100 * short:.1f} % slower than the others"
        else:
            text = f"{names}: {100 * short:.1f} % below its peers in {margin.title}"
        if found.is_named:
            state = State.WATCH if len(who) == 2 else State.SLOW
            text += f"; confirmed in {found.slow} of {found.of} moments over {span:.0f} s"
        elif found.is_named is False:
            if short < margin.warn or found.slow * 2 < found.of:
                return  # fresh data does not show it
            state, text = State.WATCH, f"{text}; {found.slow} of {found.of} moments are too few to blame it"
        elif not found.of:
            state, text = State.WATCH, f"{text}; it was not measured again"
        else:
            state = State.WATCH
            text += f"; slow in {found.slow} of {found.of} moments over {span:.0f} s, of {needed:.0f} s that blame it"
        facts: Document = {
            "test": test,
            "unit": margin.unit,
            "shortfall": _round(short),
            "margin": {"warn": margin.warn, "fail": margin.fail},
            "confirmed": {
                "slow": found.slow,
                "of": found.of,
                "level": _round(found.level),
                "span_seconds": round(span, 3),
                "needed_seconds": round(needed, 3),
            },
        }
        if not is_network:
            screen, rank = self.screens[test], who[0]
            facts |= {
                "rank": rank,
                "value": _round(math.exp(screen.levels[str(rank)])),
                "peers": {"n": len(screen.levels) - 1, "median": _round(math.exp(screen.median))},
                "evidence": f"logs/rank-{rank}.log",
            }
        self._find(reason, nodes, state, text, **facts)

    def _moments(self, case: Case | None) -> list[tuple[float, bool]]:
        """When a case was measured again, and whether it was slow then, in the order of time."""
        if case is None:
            return []
        fail = TESTS[case.test].fail
        found: dict[int, tuple[float, bool]] = {}
        if case.test == "network":
            rates: dict[int, list[tuple[tuple[int, int], float, float]]] = {}
            for pair in self.samples.pairs:
                if pair.case == case.number and pair.moment is not None:
                    rates.setdefault(pair.moment, []).append((pair.pair, 1 / pair.seconds, pair.at))
            for moment, rows in rates.items():
                touches = [row for row in rows if set(case.suspect) <= set(row[0])]
                others = [rate for pair, rate, _ in rows if not set(case.suspect) <= set(pair)]
                is_slow = rules.is_slow(touches[0][1] if touches else None, others, fail)
                if is_slow is not None:
                    found[moment] = (max(at for _, _, at in rows), is_slow)
        else:
            values: dict[int, dict[int, float]] = {}
            times: dict[int, float] = {}
            for sample in self.samples.nodes:
                if sample.case == case.number and sample.moment is not None and case.test in sample.values:
                    values.setdefault(sample.moment, {}).setdefault(sample.rank, sample.values[case.test])
                    times[sample.moment] = max(sample.at, times.get(sample.moment, 0.0))
            for moment, by_rank in values.items():
                peers = [value for rank, value in by_rank.items() if rank in case.peers]
                is_slow = rules.is_slow(by_rank.get(case.suspect[0]), peers, fail)
                if is_slow is not None:
                    found[moment] = (times[moment], is_slow)
        return sorted(found.values())

    def _dips(self) -> list[float]:
        series: dict[tuple[str, object], list[tuple[float, float]]] = {}
        tests = {case.number: case for case in self.samples.cases if case.test != "network"}
        for sample in self.samples.nodes:
            case = tests.get(-1 if sample.case is None else sample.case)
            if case is not None and sample.rank in case.peers and case.test in sample.values:
                series.setdefault((case.test, sample.rank), []).append((sample.at, sample.values[case.test]))
        for pair in self.samples.pairs:
            if pair.case is not None and pair.moment is None:
                series.setdefault(("network", pair.pair), []).append((pair.at, 1 / pair.seconds))
        return [rules.longest_dip(sorted(rows), TESTS[test].fail) for (test, _), rows in series.items()]

    def _warn_unsuspected(self, suspected: set[tuple[str, tuple[int, ...]]]) -> None:
        """Nodes beyond the warning, but not beyond the screen."""
        for test, found in self.screens.items():
            margin = TESTS[test]
            limit = max(-math.log1p(-margin.warn), rules.SCREEN_DEVIATIONS * found.scale)
            if len(found.suspects) > rules.CROWD * len(found.levels):
                continue
            for unit, level in sorted(found.levels.items(), key=lambda item: item[1]):
                if found.median - level >= limit and (test, (int(unit),)) not in suspected:
                    number, short = self.node_of(int(unit)), -math.expm1(level - found.median)
                    text = f"{self.names[number]}: {100 * short:.1f} % below its peers in {margin.title}"
                    self._find(margin.reason, [number], State.WATCH, text, test=test, shortfall=_round(short))

    def _watch_flapping(self) -> None:
        """Nodes that are slow in a part of the cycles of a soak."""
        for test, by_unit in self._values(cycle=True).items():
            count = max(map(len, by_unit.values()))
            whole = [values for values in by_unit.values() if len(values) == count]
            if count < 4 or len(whole) < rules.LEAST_FLEET:
                continue
            medians = [statistics.median(values[cycle] for values in whole) for cycle in range(count)]
            limit = 1 - TESTS[test].fail
            slow = {
                int(unit): sum(value < medians[at] * limit for at, value in enumerate(values))
                for unit, values in by_unit.items()
            }
            flapping = {rank: cycles for rank, cycles in slow.items() if cycles >= max(3, count // 4)}
            if len(flapping) > rules.CROWD * len(by_unit):
                continue  # busy machines, and no property of a node
            for rank, cycles in flapping.items():
                number = self.node_of(rank)
                if self.states[number] in (State.OK, State.WATCH):
                    text = f"{self.names[number]}: slow in {TESTS[test].title} in {cycles} of {count} cycles"
                    self._find("flapping", [number], State.WATCH, text, test=test)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def _find_drift(self) -> list[Document]:
        """Keys of the inventory in which nodes differ, with the nodes of each rarer value."""
        kept: dict[int, dict[str, str]] = {}
        for rank, keys in sorted(self.samples.inventories.items()):
            kept.setdefault(self.node_of(rank), keys)
        found = []
        for key in sorted({key for keys in kept.values() for key in keys}):
            counts = Counter(keys.get(key, "") for keys in kept.values())
            if len(counts) > 1:
                usual = min(counts, key=lambda value: (-counts[value], value))
                others: dict[str, list[str]] = {}
                for number, keys in kept.items():
                    if keys.get(key, "") != usual and number < len(self.names):
                        others.setdefault(keys.get(key, ""), []).append(self.names[number])
                found.append({"key": key, "usual": usual, "others": others})
        late = {
            rank: seconds
            for rank, seconds in self.samples.offsets.items()
            if abs(seconds) > CLOCK_SECONDS and rank < self.samples.ranks
        }
        if late:
            others = {f"{seconds:+.1f} s": [self.names[self.node_of(rank)]] for rank, seconds in late.items()}
            found.append({"key": "clock", "usual": "as rank 0", "others": others})
        return found

    def _hardware(self) -> dict[str, str]:
        """The usual processor, memory and devices of the fleet."""
        found = {}
        for key in _HARDWARE:
            counts = Counter(keys[key] for keys in self.samples.inventories.values() if key in keys)
            if counts:
                found[key] = min(counts, key=lambda value: (-counts[value], value))
        return found

    def _delivered(self) -> Document | None:
        """What the largest number of a set says: the set that was measured last, without the nodes named by then."""
        sets = [item.set for item in self.samples.together if item.set < 2]
        if not sets:
            return None
        rows = [item for item in self.samples.together if item.set == max(sets)]
        ranks = rows[0].ranks
        nodes = sorted({self.names[self.node_of(rank)] for rank in ranks if self.node_of(rank) < len(self.names)})
        collectives = [self._collective(item) for item in rows if item.operation != "training"]
        training = next((_training(item) for item in rows if item.operation == "training"), None)
        return {"nodes": nodes, "ranks": len(ranks), "collectives": collectives, "training": training}

    def _collective(self, item: Together) -> Document:
        seconds, size = statistics.median(item.times), len(item.ranks)
        factor = (2 if item.operation == "all_reduce" else 1) * (size - 1) / size
        bandwidth = item.bytes / seconds / 1e9 * factor
        if not item.is_right:
            self.rejected.append(f"{item.operation} gives wrong sums")
        if item.transport == "Socket" and any(row.get("infiniband") for row in self.samples.inventories.values()):
            text = f"{item.operation} goes over TCP although nodes have InfiniBand"
            self.findings.append({"reason": "transport_fallback", "nodes": [], "state": "ok", "summary": text})
            self.rejected.append(text)
        row: Document = {
            "operation": item.operation,
            "bytes": item.bytes,
            "seconds": _round(seconds),
            "busbw_gbps": _round(bandwidth),
            "spread": _round(max(item.times) / min(item.times)),
            "transport": item.transport,
            "expected": None,
        }
        nodes = len({self.node_of(rank) for rank in item.ranks})
        for known in self.expected:
            if (known["operation"], known["bytes"], known["nodes"]) == (item.operation, item.bytes, nodes):
                share = bandwidth / known["value"]
                row["expected"] = {"value": known["value"], "source": known["source"], "share": _round(share)}
                if share < ACCEPTED_SHARE:
                    text = (
                        f"{item.operation} of {item.bytes} bytes reaches {100 * share:.0f} % of the "
                        f"{known['value']:g} GB/s of {known['source']}"
                    )
                    self.findings.append({"reason": "below_expected", "nodes": [], "state": "ok", "summary": text})
                    self.rejected.append(text)
        return row

    def _measured(self, delivers: Document | None) -> set[str]:
        found = {"drift"} if self.samples.inventories else set()
        if any(sample.round is not None and sample.values for sample in self.samples.nodes):
            found.add("node")
        if any(sample.case is None for sample in self.samples.pairs):
            found.add("pairs")
        if delivers is not None:
            found |= {"collectives"} if delivers["collectives"] else set()
            found |= {"training"} if delivers["training"] else set()
        tested = {self.node_of(sample.rank) for sample in self.samples.nodes if sample.values}
        for number, state in self.states.items():
            if "node" in found and number not in tested and state is State.OK:
                self.states[number] = State.NOT_TESTED
        return found

    def _decide(self, measured: set[str]) -> tuple[Verdict, str]:
        """The verdict and its reason in one sentence."""
        bad = [self.names[number] for number, state in self.states.items() if state.is_bad]
        untested = [self.names[number] for number, state in self.states.items() if state is State.NOT_TESTED]
        missing = [stage for stage in STAGES if stage not in measured]
        blind = {test: facts for test, facts in self.fleet.items() if _is_blind(facts)}
        delivered = self._names_in_last_set()
        if self.rejected:
            return Verdict.REJECTED, self.rejected[0]
        if len(bad) > max(1, rules.CROWD * len(self.names)):
            return Verdict.REJECTED, f"{len(bad)} of {len(self.names)} nodes are bad: {_list(bad)}"
        if not any(self.started):
            return Verdict.CANNOT_TELL, "no node started"
        if self.samples.ended is None:
            rest = f"; not measured: {_list(missing)}" if missing else " while suspects were measured again"
            return Verdict.CANNOT_TELL, f"the measurement was cut short{rest}"
        if (count := len(self._answered())) < rules.LEAST_FLEET:
            return Verdict.CANNOT_TELL, (
                f"{count} nodes are no fleet to compare a node with: {rules.LEAST_FLEET} are needed"
            )
        if missing or untested:
            return Verdict.CANNOT_TELL, f"not tested: {_list([*missing, *untested])}"
        if self.notes:
            return Verdict.CANNOT_TELL, self.notes[0]
        if blind:
            worst = max(blind.values(), key=lambda facts: facts["smallest_shortfall"] / facts["fail"])
            return Verdict.CANNOT_TELL, (
                f"the machines are too busy: in {worst['title']} only a node that is "
                f"{100 * worst['smallest_shortfall']:.0f} % slower than its peers would have been found"
            )
        if bad:
            if set(bad) & set(delivered) or not delivered:
                return Verdict.CANNOT_TELL, f"the others were not measured without {_list(bad)}"
            return Verdict.ACCEPTED_WITHOUT, f"without {_list(bad)}"
        return Verdict.ACCEPTED, f"no node of {len(self.names)} is to be returned"

    def _names_in_last_set(self) -> list[str]:
        sets = [item.set for item in self.samples.together if item.set < 2]
        last = max(sets, default=0)
        ranks = {rank for item in self.samples.together if item.set == last for rank in item.ranks}
        return sorted({self.names[self.node_of(rank)] for rank in ranks if self.node_of(rank) < len(self.names)})

    def _relative(self) -> dict[int, dict[str, float]]:
        """Node -> test -> its worst unit's level relative to the fleet's median."""
        found: dict[int, dict[str, float]] = {}
        for test, screen in self.screens.items():
            for unit, level in screen.levels.items():
                row, value = found.setdefault(self.node_of(int(unit)), {}), _round(math.expm1(level - screen.median))
                row[test] = min(value, row.get(test, value))
        if self.explained is not None:
            for node, level in self.explained.levels.items():
                found.setdefault(node, {})["network"] = _round(math.expm1(-level))
        return found


def _smallest_shortfall(found: rules.Screen, by_unit: Mapping[str, Sequence[float]], fail: float) -> float:
    """The shortfall that this run would have found 95 times in 100, from its own noise."""
    rest = [math.log(value) - found.levels[unit] for unit in found.levels for value in by_unit[unit]]
    repeats = len(rest) / len(found.levels)
    noise = 1.4826 * statistics.median(map(abs, rest)) * math.sqrt(repeats / max(1.0, repeats - 1))
    limit = max(rules.SCREEN_SHARE * -math.log1p(-fail), rules.SCREEN_DEVIATIONS * found.scale)
    at_screen = limit + _SCREEN_QUANTILE * noise * math.sqrt(math.pi / 2 / max(1.0, repeats))
    at_looks = -math.log1p(-fail) + _LOOK_QUANTILE * noise * math.sqrt(1 + math.pi / 2 / rules.PEERS)
    return -math.expm1(-max(at_screen, at_looks))


def _is_blind(facts: Mapping[str, Any]) -> bool:
    least = facts["smallest_shortfall"]
    return least is not None and least > BLIND * facts["fail"]


def _training(item: Together) -> Document:
    steps = sorted(item.times[min(2, len(item.times) - 1) :])
    median, facts = statistics.median(steps), item.facts
    wall = facts.get("wall", 0.0)
    return {
        "steps": len(item.times),
        "samples_per_second": _round(facts.get("batch", 0.0) * len(item.ranks) / median),
        "p99_over_p50": _round(steps[math.ceil(0.99 * len(steps)) - 1] / median),
        "goodput": _round(min(1.0, median * len(item.times) / wall)) if wall else None,
        "checkpoint_write_mbps": _rate(facts, "write"),
        "checkpoint_read_mbps": _rate(facts, "read"),
    }


def _rate(facts: Mapping[str, float], name: str) -> float | None:
    """MB/s of the checkpoint."""
    seconds = facts.get(name, 0.0)
    return _round(facts["bytes"] / seconds / 1e6) if seconds > 1e-9 and "bytes" in facts else None


def _fisher(both: int, slow: int, having: int, total: int) -> float:
    """The probability that at least `both` of `slow` nodes have a value that `having` of `total` nodes have."""
    ways = math.comb(total, slow)
    most = min(slow, having)
    return sum(math.comb(having, k) * math.comb(total - having, slow - k) for k in range(both, most + 1)) / ways


def _round(value: float) -> float:
    """Six significant digits: the last ones of logarithms differ between platforms."""
    return float(f"{value:.6g}")


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
