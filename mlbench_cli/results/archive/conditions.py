"""What a run went through, as far as its evidence says: other load on its machines, the network between its workers,
and faults.

`Conditions` say whether a run had its machines to itself. They are derived only from the spec, the provenance and the
samples in resources.jsonl, whose rows of kind "machine" are described in agent/load.py. Their labels:

    crowded        more ranks, or CPUs for them, than usable cores; or more ranks than GPUs
    contended      other processes (or other virtual machines) used more than MAX_OTHER_SHARE of the usable CPUs
    quota_limited  the kernel throttled the run because of a CPU quota of its control groups
    shared         the run did not have the machine's lock, so other runs of mlbench may have run at the same time
    slow_network   NCCL did not use the machines' fast network
    preloaded      a library was loaded before all others, which may replace clocks, sockets and memory; only named
                   in a document if it applies

If the fast network does not work, NCCL silently falls back to TCP: results are correct, but the bandwidth between
machines is a fraction of the advertised one.

network.json has the network between the workers. Its evidence is either in resources.jsonl, where the agents of several
nodes write a row of kind "network" (agent/network/probe.py, before the ranks started) and one of kind "interface" each
(counters after the ranks ended); or shaping.json, which the local engine writes if it emulated the network
(`--network`) and probed it before the ranks started and after they ended.

The cost of faults follows from faults.json and the checkpoints that rank 0 reported. Every second from the start of the
first rank to the end of the run is in exactly one of PARTS:

    startup       until the first attempt trains
    useful        training and validation that led to the result
    checkpointing waiting for a checkpoint to be written
    waiting       a rank was stopped or slowed, and recovered by itself
    lost          work after the checkpoint from which the next attempt resumed
    detection     from a fault to the end of its attempt
    restart       from the end of an attempt until the next one trains, excluding loading
    loading       reading the checkpoint

All values are untrusted: malformed ones are omitted.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard

from msgspec import Struct

from mlbench_cli.agent.load import PRELOAD
from mlbench_cli.errors import UsageError
from mlbench_cli.model.faults import FaultKind, Policy, parse_faults
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.network import MODELED, NOT_SHAPED, find_deviations, is_modeled, parse_network
from mlbench_cli.model.run import Finding
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import (
    LABELS,
    FaultsDocument,
    NetworkDocument,
    ProbeDocument,
    RecoveryDocument,
    SummaryDocument,
    TrafficDocument,
)
from mlbench_cli.results.archive.evidence import MAX_LINKS, ReportedFacts, SampleWatch
from mlbench_cli.util.json_text import make_strict
from mlbench_cli.util.text import counted, one_line

RARE = ("preloaded",)  # labels that documents leave out where they do not apply
MAX_OTHER_SHARE = 0.10  # of the usable CPUs, on average over the run
MIN_OTHER_SECONDS = 0.5  # CPU time; less than this may be the client that follows a short run
MIN_PEAK_SECONDS = 0.5  # /proc/stat counts hundredths of a second, so shorter intervals are inaccurate
# Prefixes of the names of networks that bypass the kernel's TCP: those of aws-ofi-nccl ("Libfabric", formerly "AWS
# Libfabric"), Google's plugins ("FasTrak" is TCPXO) and NCCL itself. All others, including "FastSocket", are slower.
FAST_NETWORKS = ("AWS Libfabric", "Libfabric", "GPUDirectTCPX", "FasTrak", "gIB", "IB")
_LOAD_COUNTERS = ("elapsed_seconds", "busy_seconds", "own_seconds", "throttled_periods", "throttled_seconds")
MIN_COUNTED = 0.95  # share of the bytes that the ranks must have sent; if less was counted, some took another route
_LINK_FIGURES = (
    *("rtt_p50_seconds", "rtt_p90_seconds", "alone_bits_per_second", "together_bits_per_second"),
    *("first_bits_per_second", "first_bytes"),
)
_LINK_COUNTERS = ("rx_bytes", "rx_packets", "rx_dropped", "tx_bytes", "tx_packets", "tx_dropped", "retransmits")
NOT_INJECTED = "fault_not_injected"
PARTS = ("startup", "useful", "checkpointing", "waiting", "lost", "detection", "restart", "loading")
MAX_EVENTS = 10_000  # and attempts


# --- other load -------------------------------------------------------------------------------------------------------


class Condition(Struct, frozen=True):
    """One label with its reason in words, and the figures behind it (with units in their names)."""

    label: str
    reason: str
    figures: Mapping[str, float] = {}

    @property
    def phrase(self) -> str:
        """Label and reason in one line."""
        return f"{self.label.replace('_', '-')}: {self.reason}"


class Conditions(Struct, frozen=True):
    """The conditions of a run; None for each that does not apply. `measured` is False if nothing was sampled."""

    crowded: Condition | None = None
    contended: Condition | None = None
    quota_limited: Condition | None = None
    shared: Condition | None = None
    slow_network: Condition | None = None
    preloaded: Condition | None = None
    measured: bool = False

    @property
    def found(self) -> tuple[Condition, ...]:
        """The conditions that apply."""
        return tuple(condition for label in LABELS if (condition := getattr(self, label)) is not None)

    @property
    def labels(self) -> tuple[str, ...]:
        """The LABELS that apply, in that order."""
        return tuple(condition.label for condition in self.found)

    @property
    def phrase(self) -> str:
        """ "crowded: 4 ranks on 2 cores; shared: --share-machine"; empty if no condition applies."""
        return "; ".join(condition.phrase for condition in self.found)

    def to_dict(self) -> dict[str, Any]:
        """For result.json: `measured`, `labels`, and each label with its reason and figures, or null."""
        by_label = {condition.label: condition for condition in self.found}
        each = {
            label: {"reason": by_label[label].reason, "figures": dict(by_label[label].figures)}
            if label in by_label
            else None
            for label in LABELS
            if label in by_label or label not in RARE
        }
        return {"measured": self.measured, "labels": list(self.labels), **each}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Conditions":
        """The inverse of `to_dict`. Raises KeyError or TypeError for anything else."""
        names = [label for label in LABELS if label in document or label not in RARE]
        found = {label: entry for label in names if (entry := document[label]) is not None}
        each = {
            label: Condition(label, str(entry["reason"]), {str(key): float(x) for key, x in entry["figures"].items()})
            for label, entry in found.items()
        }
        return cls(**each, measured=bool(document["measured"]))


def assess_conditions(
    spec: RunSpec,
    provenance: Mapping[str, Any] | None,
    samples: Iterable[Mapping[str, Any]],
    is_alone: bool = True,
    environments: Mapping[int, Mapping[str, Any]] | None = None,
) -> Conditions:
    """The conditions of a run, from its spec, its provenance and its resource samples.

    Samples are read once, in constant memory. Malformed rows, and rows of other kinds, are skipped. `is_alone`: whether
    each worker of a cluster run has its own node; if not, other processes on the node may belong to the run and are
    ignored. Without rows of kind "machine", the number of cores is that of the provenance (`machine.cores`), if known.
    `environments` are the facts that ranks reported.
    """
    meters: dict[int, _Meter] = {}
    for row in samples:
        if row.get("kind") == "machine":
            worker = row.get("worker")
            meters.setdefault(worker if isinstance(worker, int) else 0, _Meter()).add(row)
    meters = {worker: meter for worker, meter in meters.items() if meter.last}
    facts = next((meter.facts for meter in meters.values() if meter.facts), {})
    local = spec.engine == "local"
    locks = [meter.facts for meter in meters.values() if local or meter.facts.get("lock")]  # pods have no lock
    return Conditions(
        crowded=_check_crowding(spec, provenance, _amount(facts.get("cores"))) if local else None,
        contended=_worst([_check_contention(meter) for meter in meters.values() if local or is_alone], "other_cpus"),
        quota_limited=_worst([_quota_limited(meter) for meter in meters.values()], "throttled_seconds"),
        shared=_check_sharing(spec, locks) if local or locks else None,
        slow_network=check_fabric(spec, environments or {}),
        preloaded=_check_preload(provenance, environments or {}, [meter.facts for meter in meters.values()]),
        measured=bool(meters),
    )


class _Meter:
    """First and last counters of one machine, and the highest load in between."""

    def __init__(self) -> None:
        self.facts: Mapping[str, Any] = {}
        self.last: dict[str, float] = {}
        self.peak = 0.0  # CPUs that others used over the busiest interval
        self._before: dict[str, float] = {"elapsed_seconds": 0.0, "busy_seconds": 0.0, "own_seconds": 0.0}

    def add(self, row: Mapping[str, Any]) -> None:
        counters = {name: value for name in _LOAD_COUNTERS if (value := _amount(row.get(name))) is not None}
        if "elapsed_seconds" not in counters:
            return
        if "cores" in row and not self.facts:
            self.facts = {name: row.get(name) for name in ("cores", "quota", "lock", "lock_reason", "preloaded")}
        self.last = counters
        seconds = counters["elapsed_seconds"] - self._before["elapsed_seconds"]
        if seconds >= MIN_PEAK_SECONDS:
            self.peak = max(self.peak, (_other_seconds(counters) - _other_seconds(self._before)) / seconds)
            self._before = counters


def _check_crowding(
    spec: RunSpec, provenance: Mapping[str, Any] | None, sampled_cores: float | None
) -> Condition | None:
    machine = (provenance or {}).get("machine")
    machine = machine if isinstance(machine, Mapping) else {}
    cores, gpus = sampled_cores or _amount(machine.get("cores")), machine.get("gpus")
    if cores is None or cores < 1:
        return None
    ranks = spec.workers * spec.processes_per_worker if spec.run_on_all else 1
    cpus = float(spec.cpus or 0.0) * (spec.workers if spec.run_on_all else 1)
    figures = {"ranks": ranks, "cpus": cpus, "cores": cores}
    if spec.device == "gpu" and isinstance(gpus, list | tuple) and 0 < len(gpus) < ranks:
        figures["gpus"] = len(gpus)
        return Condition("crowded", f"{ranks} ranks on {counted(len(gpus), 'GPU')}", figures)
    if ranks > cores:
        return Condition("crowded", f"{ranks} ranks on {counted(cores, 'core')}", figures)
    if cpus > cores:
        return Condition("crowded", f"{cpus:g} CPUs for {counted(ranks, 'rank')} on {counted(cores, 'core')}", figures)
    return None


def _check_contention(meter: _Meter) -> Condition | None:
    seconds, cores = meter.last["elapsed_seconds"], _amount(meter.facts.get("cores"))
    if seconds <= 0 or cores is None or cores < 1:
        return None
    other = _other_seconds(meter.last)
    if other < MIN_OTHER_SECONDS or other / seconds <= MAX_OTHER_SHARE * cores:
        return None
    reason = f"other processes used {other / seconds:.2g} of {counted(cores, 'CPU')} on average"
    figures = {"other_cpus": other / seconds, "peak_other_cpus": meter.peak, "cores": cores}
    return Condition("contended", reason, {name: round(value, 4) for name, value in figures.items()})


def _other_seconds(counters: Mapping[str, float]) -> float:
    """CPU seconds that everything but this run used."""
    busy, own = counters.get("busy_seconds"), counters.get("own_seconds", 0.0)
    return 0.0 if busy is None else max(0.0, busy - own)


def _quota_limited(meter: _Meter) -> Condition | None:
    periods = meter.last.get("throttled_periods", 0.0)
    if periods <= 0:
        return None
    seconds = meter.last.get("throttled_seconds", 0.0)
    quota = _amount(meter.facts.get("quota"))
    limit = "a CPU quota" if quota is None else f"a quota of {counted(quota, 'CPU')}"
    reason = f"{limit} paused it {counted(int(periods), 'time')}, for {seconds:.2g} s together"
    figures = {"throttled_periods": periods, "throttled_seconds": seconds}
    return Condition("quota_limited", reason, figures if quota is None else {**figures, "quota": quota})


def _check_sharing(spec: RunSpec, machines: Iterable[Mapping[str, Any]]) -> Condition | None:
    """The condition of a run without the locks of all of its machines; machines without facts are ignored."""
    if spec.share_machine:
        return Condition("shared", "--share-machine")
    facts = next((item for item in machines if item and item.get("lock") != "held"), None)
    if facts is None:
        return None
    return Condition("shared", f"no lock of this machine ({str(facts.get('lock_reason') or 'unknown reason')[:200]})")


def find_loader_variables(
    provenance: Mapping[str, Any] | None, environments: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """The variables that bring libraries and modules of others into the ranks: as noted before the start, and
    LD_PRELOAD as the ranks report it."""
    noted = (provenance or {}).get("loader")
    found = {str(name): {str(value)} for name, value in noted.items()} if isinstance(noted, Mapping) else {}
    _add_variables(found, (facts.get("variables") for facts in environments), ("LD_PRELOAD",))
    return {name: one_line(" and ".join(sorted(values)), 2000) for name, values in sorted(found.items())}


def _add_variables(found: dict[str, set[str]], reported: Iterable[object], names: Iterable[str]) -> None:
    """Add what several reports say of the variables that are not known yet."""
    mappings = [each for each in reported if isinstance(each, Mapping)]
    for name in names:
        values = {str(each[name]) for each in mappings if each.get(name)}
        if values and name not in found:
            found[name] = values


def _check_preload(
    provenance: Mapping[str, Any] | None,
    environments: Mapping[int, Mapping[str, Any]],
    machines: Iterable[Mapping[str, Any]],
) -> Condition | None:
    known = find_loader_variables(provenance, environments.values())
    found = {name: {value} for name, value in known.items()}
    _add_variables(found, (facts.get("preloaded") for facts in machines), PRELOAD)
    texts = {name: " and ".join(sorted(values)) for name, values in found.items()}
    named = one_line(", ".join(f"{name}={texts[name]}" for name in PRELOAD if name in texts), 300)
    return Condition("preloaded", f"{named} may replace clocks, sockets and memory") if named else None


def check_fabric(spec: RunSpec, environments: Mapping[int, Mapping[str, Any]]) -> Condition | None:
    """The condition of a run whose machines have a faster network than it used; None if it used the fast one.

    Ranks that did not report their network, because they ended early or did not use NCCL, are ignored.
    """
    fabric = spec.pods.fabric
    gbits = fabric.get("gbits")
    if not fabric or spec.workers < 2 or not is_finite_number(gbits):
        return None
    used = {rank: network for rank, facts in environments.items() if (network := _find_network(facts))}
    slow = {rank: network for rank, network in used.items() if not network.startswith(FAST_NETWORKS)}
    if not slow:
        return None
    names = ", ".join(sorted(set(slow.values())))
    reason = f"NCCL used {names}; the machines have {gbits:g} Gbit/s of {fabric.get('name')}"
    return Condition("slow_network", reason, {"slow_ranks": len(slow), "nominal_gbits": float(gbits)})


def _find_network(facts: Mapping[str, Any]) -> str | None:
    """The network that a rank's NCCL chose, from its environment event."""
    found = facts.get("nccl")
    network = found.get("network") if isinstance(found, Mapping) else None
    return one_line(network) if isinstance(network, str) else None


def _worst(found: Iterable[Condition | None], figure: str) -> Condition | None:
    known = [condition for condition in found if condition is not None]
    return max(known, key=lambda condition: condition.figures[figure], default=None)


# --- network.json -----------------------------------------------------------------------------------------------------


def network_document(
    asked: str | None, samples: SampleWatch, shaping: Mapping[str, Any] | None, least_sent: float | None = None
) -> NetworkDocument | None:
    """network.json without its schema version; None if nothing was requested or measured.

    `least_sent`: bytes that a rank must have sent to others according to its method; None: unknown.
    """
    measured = [] if samples.probe is None else [samples.probe]
    probes = [parse_probe(report) for report in _rows(shaping.get("probes") if shaping else measured, MAX_LINKS)]
    if asked is None and not probes:
        return None
    method = _network_method(asked, shaping)
    setup = None
    if shaping is not None:
        setup = make_strict({key: value for key, value in shaping.items() if key != "probes"})
    problems = _network_problems(asked, method, probes, setup)
    traffic = _traffic(probes, samples.interfaces)
    if asked is not None and method != MODELED:
        problems += _find_detour(least_sent, setup, traffic)
    document: NetworkDocument = {
        "asked": asked,
        "method": method,
        "probes": probes,
        "traffic": traffic,
        "summary": _summarize_network(asked, method, probes, problems),
    }
    if setup is not None:
        document["setup"] = setup
    return document


def parse_probe(report: Mapping[str, Any]) -> ProbeDocument:
    """A probe's report with every field present and valid."""
    links = report.get("links")
    error = report.get("error")
    return {
        "stage": "after" if report.get("stage") == "after" else "before",
        "form": one_line(report["form"], 20) if isinstance(report.get("form"), str) else None,
        "nodes": _count(report.get("nodes")),
        "networks": _count(report.get("networks")),
        "links": [_numbers(link, ("from", "to", *_LINK_FIGURES)) for link in _rows(links, MAX_LINKS)],
        "counters": [_parse_counters(row) for row in _rows(report.get("counters"), MAX_LINKS)],
        "seconds": report["seconds"] if _is_amount(report.get("seconds")) else None,
        "error": one_line(str(error)) if error else None,
    }


def _parse_counters(row: Mapping[str, Any]) -> dict[str, str | float]:
    return {"interface": one_line(str(row.get("interface")), 20), **_numbers(row, _LINK_COUNTERS)}


def _network_method(asked: str | None, shaping: Mapping[str, Any] | None) -> str:
    if asked is not None and is_modeled(asked):
        return MODELED
    method = (shaping or {}).get("method")
    return one_line(method, 40) if isinstance(method, str) and method else NOT_SHAPED


def _network_problems(
    asked: str | None, method: str, probes: Sequence[ProbeDocument], setup: Mapping[str, Any] | None
) -> list[str]:
    """Why a shaped network differs from the request; of several probes of a stage, one must fit."""
    if asked is None or method == MODELED:
        return []
    if not probes:
        return ["it was not measured"]
    shape = parse_network(asked)
    found = []
    for stage in dict.fromkeys(probe["stage"] for probe in probes):
        each = [find_deviations(shape, probe) for probe in probes if probe["stage"] == stage]
        found += [f"{problem} ({stage} the task)" for problem in (each[-1] if all(each) else ())]
    noted = (setup or {}).get("problems")
    return found + [one_line(str(problem)) for problem in noted[:8]] if isinstance(noted, list) else found


def find_least_sent(spec: RunSpec, details: Mapping[str, Any]) -> float | None:
    """Bytes that rank 0 must have sent to other workers according to its method's counters; None if unknown.

    At least the other ranks' shares of a message leave a rank, as in a reduce-scatter. Ranks of one worker share a
    link.
    """
    communication = details.get("communication")
    count = communication.get("bytes") if isinstance(communication, Mapping) else None
    if spec.processes_per_worker > 1 or not is_finite_number(count):
        return None
    return float(count) * (spec.world_size - 1) / spec.world_size


def _find_detour(
    least_sent: float | None, setup: Mapping[str, Any] | None, traffic: TrafficDocument | None
) -> list[str]:
    """Whether the ranks' data bypassed the shaped links, through shared memory or another interface."""
    task = (setup or {}).get("task")
    by_switch: Any = task.get("sent_bytes") if isinstance(task, Mapping) else None
    sent = [value for value in by_switch if _is_amount(value)] if isinstance(by_switch, list) else []
    if not sent and traffic is not None:
        sent = [traffic["max_sent_bytes"]]
    if least_sent is None or not sent or max(sent) >= MIN_COUNTED * least_sent:
        return []
    return [f"its links counted {max(sent) / 1e6:.1f} MB, but the ranks sent {least_sent / 1e6:.1f} MB or more"]


def _summarize_network(
    asked: str | None, method: str, probes: Sequence[ProbeDocument], problems: list[str]
) -> SummaryDocument:
    before = next((probe for probe in probes if probe["stage"] == "before" and probe["links"]), None)
    links = before["links"] if before else []
    trips = sorted(link["rtt_p50_seconds"] for link in links if "rtt_p50_seconds" in link)
    lowest = {
        key: min((link[key] for link in links if key in link), default=None)
        for key in ("alone_bits_per_second", "together_bits_per_second", "first_bits_per_second")
    }
    return {
        "asked": asked,
        "method": method,
        "networks": before["networks"] if before else None,
        "rtt_seconds": trips[len(trips) // 2] if trips else None,
        "alone_bits_per_second": lowest["alone_bits_per_second"],
        "together_bits_per_second": lowest["together_bits_per_second"],
        "first_bits_per_second": lowest["first_bits_per_second"],
        "held": None if asked is None or method == MODELED else not problems,
        "problems": problems,
    }


def _traffic(probes: Sequence[ProbeDocument], interfaces: Mapping[int, Mapping[str, Any]]) -> TrafficDocument | None:
    """The growth of the counters from the probe before the task to the one after it, or to what each node read at the
    end; None if nodes share an interface."""
    if not probes or probes[0]["networks"] < 2:
        return None
    after = next((probe["counters"] for probe in probes[1:] if probe["stage"] == "after"), None)
    if after is None:
        after = [_parse_counters(interfaces[node]) for node in sorted(interfaces)]
    if len(probes[0]["counters"]) != len(after):
        return None
    pairs = list(zip(probes[0]["counters"], after, strict=True))

    def growth(key: str) -> list[int]:
        return [max(0, int(after.get(key, 0)) - int(before.get(key, 0))) for before, after in pairs]

    if not pairs:
        return None
    return {
        "max_sent_bytes": max(growth("tx_bytes")),
        "max_received_bytes": max(growth("rx_bytes")),
        "dropped_packets": sum(growth("tx_dropped")) + sum(growth("rx_dropped")),
        "retransmitted_segments": sum(growth("retransmits")),
    }


def _numbers(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {name: row[name] for name in names if _is_amount(row.get(name))}


# --- faults -----------------------------------------------------------------------------------------------------------


def faults_document(record: Mapping[str, Any] | None, reported: ReportedFacts) -> FaultsDocument | None:
    """The cost of a run's faults; None without a record of faults, or with a malformed one."""
    attempts = _rows((record or {}).get("attempts"), MAX_EVENTS)
    ended = (record or {}).get("ended")
    if record is None or not attempts:
        return None
    ends = [_number(attempt.get("ended")) for attempt in attempts]
    wall = max([_number(ended), *ends])
    events = [event for event in _rows(record.get("events"), MAX_EVENTS) if isinstance(event.get("planned"), Mapping)]
    began = _number(record.get("began"))
    seconds = dict.fromkeys(PARTS, 0.0)
    recoveries: list[RecoveryDocument] = []
    timeline: list[list[Any]] = []
    before = None  # unfinished recovery of the previous attempt
    for number, attempt in enumerate(attempts):
        following = attempts[number + 1] if number + 1 < len(attempts) else None
        # The time before the first attempt's ranks were started is part of its startup.
        start = _number(attempt.get("started")) if number else 0.0
        end = ends[number] if following is not None else wall
        trained = attempt.get("training")
        training = min(_number(trained), end) if is_finite_number(trained) else end
        loading = math.fsum(cost for moment, _, cost in reported.restored if start <= moment - began <= training + 1)
        loading = min(loading, training - start)
        timeline.append(["restart" if number else "startup", start, training])
        seconds["restart" if number else "startup"] += training - start - loading
        seconds["loading"] += loading
        if before is not None:
            before["restart"], before["loading"] = round(training - before["at"] - before["detection"], 3), loading
            before["restart"] = round(before["restart"] - loading, 3)
            before["seconds"] = round(training - before["at"] + before["lost"], 3)
            before = None
        if following is None:
            kept = fault = end
        else:
            fault = _find_fault(events, training, end)
            kept = _find_kept(reported, following, attempt, began, training, fault)
            seconds["lost"] += fault - kept
            seconds["detection"] += end - fault
            seconds["restart"] += _number(following.get("started")) - end
            again = _number(following.get("started"))
            timeline += [["lost", kept, fault], ["detection", fault, end], ["restart", end, again]]
            rank = attempt.get("rank")
            before = RecoveryDocument(
                at=round(fault, 3),
                rank=rank if isinstance(rank, int) else None,
                why=str(attempt.get("why"))[:40],
                detection=round(end - fault, 3),
                restart=0.0,
                loading=0.0,
                lost=round(fault - kept, 3),
                seconds=0.0,
            )
            recoveries.append(before)
        checkpointing = math.fsum(
            cost for moment, _, cost in reported.written if training <= moment - began <= kept + 0.01
        )
        checkpointing = min(checkpointing, kept - training)
        waiting = min(_find_waiting(events, training, kept), kept - training - checkpointing)
        seconds["checkpointing"] += checkpointing
        seconds["waiting"] += waiting
        timeline.append(["useful", training, kept])
        seconds["useful"] += kept - training - checkpointing - waiting
    done = [event for event in events if event.get("problem") is None]
    costs = [cost for _, _, cost in reported.written]
    return {
        "script": None if record.get("script") is None else str(record["script"]),
        "policy": str(record.get("policy")),
        "planned": len(events),
        "injected": len(done),
        "attempts": len(attempts),
        "ranks": int(_number(attempts[-1].get("ranks"))),
        "wall_seconds": round(wall, 3),
        "seconds": {part: round(value, 3) for part, value in seconds.items()},
        "goodput": round(seconds["useful"] / wall, 4) if wall else None,
        "checkpoints": len(costs),
        "checkpoint_seconds": round(math.fsum(costs) / len(costs), 4) if costs else None,
        "recoveries": recoveries,
        "timeline": [[part, round(begin, 3), round(end, 3)] for part, begin, end in timeline if end > begin],
        "events": [
            [
                str(event["planned"].get("kind"))[:10],
                target if isinstance(target := event["planned"].get("target"), int) else None,
                round(_number(event.get("at")), 3),
                round(_number(event["until"]), 3) if event.get("until") is not None else None,
            ]
            for event in done
        ],
    }


def _find_fault(events: list[Mapping[str, Any]], training: float, end: float) -> float:
    """When the fault that ended an attempt began; the end itself if none was injected."""
    ending = (FaultKind.KILL, FaultKind.STOP)
    moments = [
        _number(event.get("at"))
        for event in events
        if event.get("problem") is None and event["planned"].get("kind") in ending
    ]
    return max((moment for moment in moments if training <= moment <= end), default=end)


def _find_kept(
    reported: ReportedFacts,
    following: Mapping[str, Any],
    attempt: Mapping[str, Any],
    began: float,
    training: float,
    fault: float,
) -> float:
    """Until when the work of an attempt was kept: the checkpoint from which the next one resumed."""
    update = following.get("resumed_update")
    if update is None or update == attempt.get("resumed_update"):
        return training
    moments = [moment - began for moment, step, _ in reported.written if step == update]
    found = [moment for moment in moments if training <= moment <= fault + 1]
    return min(fault, max(found, default=training))


def _find_waiting(events: list[Mapping[str, Any]], begin: float, end: float) -> float:
    """Seconds for which a rank was stopped; for slowed ranks, the corresponding share."""
    total = 0.0
    for event in events:
        kind = event["planned"].get("kind")
        if kind not in (FaultKind.STOP, FaultKind.SLOW) or event.get("problem") is not None:
            continue
        until = event.get("until")
        overlap = min(end, _number(until) if until is not None else end) - max(begin, _number(event.get("at")))
        share = 1.0 if kind == FaultKind.STOP else _number(event.get("stopped_share"))
        total += max(0.0, overlap) * share
    return total


def find_not_injected(spec: RunSpec, record: Mapping[str, Any] | None, is_success: bool) -> Finding | None:
    """The finding that faults of the script were not injected; None if every fault whose time was reached was
    injected."""
    if spec.faults is None or not is_success:
        return None
    problems = [
        f"{_describe(event)}: {event['problem']}"
        for event in _rows((record or {}).get("events"), MAX_EVENTS)
        if event.get("problem")
    ]
    if record is None:
        problems = ["they were not recorded"]
    elif record.get("never_trained"):
        problems.append("the training, from which their times count, never began")
    elif record.get("missed"):
        problems.append(f"{_describe({'planned': record['missed']})}: the run ended between two attempts")
    if not problems:
        return None
    return Finding(
        NOT_INJECTED,
        f"Not all faults were injected, so the result does not count: {'; '.join(problems[:3])}.",
        hint="Run it again, or remove the faults that cannot be injected here.",
        evidence={"problems": problems[:20]},
    )


def find_fault_contradictions(spec: RunSpec, record: Mapping[str, Any] | None) -> Iterator[str]:
    """Contradictions between faults.json and the spec."""
    if record is None:
        return
    if record.get("script") != spec.faults or record.get("policy") != (spec.on_failure or Policy.FAIL):
        yield "faults.json has another script or policy than the run"
        return
    if len(_rows(record.get("attempts"), MAX_EVENTS)) > 1 and record.get("policy") == Policy.FAIL:
        yield "its ranks were started again, against its policy"
    events = _rows(record.get("events"), MAX_EVENTS)
    try:
        script = None if spec.faults is None else parse_faults(spec.faults)
        faults = script.plan(spec.seed, spec.world_size, spec.workers) if script else ()
        plan = [fault.to_dict() for fault in islice(faults, len(events))]
    except UsageError as error:
        yield f"its fault script cannot be read: {error.message}"
        return
    if [event.get("planned") for event in events] != plan:
        yield "the faults do not follow from the script and the seed"


def faults_phrase(document: FaultsDocument) -> str:
    """ "after 2 faults and 1 restart"; empty if nothing happened."""
    faults, restarts = document["injected"], document["attempts"] - 1
    words = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((faults, "fault"), (restarts, "restart"))
        if count
    ]
    return f"after {' and '.join(words)}" if words else ""


def _describe(event: Mapping[str, Any]) -> str:
    planned = event.get("planned")
    if not isinstance(planned, Mapping):
        return "a fault"
    target = planned.get("target")
    return f"{str(planned.get('kind'))[:10]}{'' if target is None else f' {str(target)[:10]}'}"


def _number(value: Any) -> float:
    return _amount(value) or 0.0


# --- values -----------------------------------------------------------------------------------------------------------


def _rows(value: Any, limit: int) -> list[Mapping[str, Any]]:
    return [row for row in value[:limit] if isinstance(row, Mapping)] if isinstance(value, list) else []


def _is_amount(value: Any) -> TypeGuard[int | float]:
    return is_finite_number(value) and value >= 0


def _count(value: Any) -> int:
    return value if _is_amount(value) and isinstance(value, int) else 0


def _amount(value: Any) -> float | None:
    return float(value) if _is_amount(value) else None
