"""The conditions of a run's measurements: whether it had its CPUs to itself, as far as known.

Derived only from the spec, the provenance and the samples in resources.jsonl. Rows of kind "machine" are described in
agent/load.py. Labels:

    crowded        more ranks, or CPUs for them, than usable cores; or more ranks than GPUs
    contended      other processes (or other virtual machines) used more than MAX_OTHER_SHARE of the usable CPUs
    quota_limited  the kernel throttled the run because of a CPU quota of its control groups
    shared         the run did not have the machine's lock, so other runs of mlbench may have run at the same time
    slow_network   NCCL did not use the machines' fast network
    preloaded      a library was loaded before all others, which may replace clocks, sockets and memory; only named
                   in a document if it applies

If the fast network does not work, NCCL silently falls back to TCP: results are correct, but the bandwidth between
machines is a fraction of the advertised one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlbench_cli.agent.load import PRELOAD
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.text import counted, one_line

LABELS = ("crowded", "contended", "quota_limited", "shared", "slow_network", "preloaded")
RARE = ("preloaded",)  # labels that documents leave out where they do not apply
MAX_OTHER_SHARE = 0.10  # of the usable CPUs, on average over the run
MIN_OTHER_SECONDS = 0.5  # CPU time; less than this may be the client that follows a short run
MIN_PEAK_SECONDS = 0.5  # /proc/stat counts hundredths of a second, so shorter intervals are inaccurate
# Prefixes of the names of networks that bypass the kernel's TCP: those of aws-ofi-nccl ("Libfabric", formerly "AWS
# Libfabric"), Google's plugins ("FasTrak" is TCPXO) and NCCL itself. All others, including "FastSocket", are slower.
FAST_NETWORKS = ("AWS Libfabric", "Libfabric", "GPUDirectTCPX", "FasTrak", "gIB", "IB")
_COUNTERS = ("elapsed_seconds", "busy_seconds", "own_seconds", "throttled_periods", "throttled_seconds")


@dataclass(frozen=True)
class Condition:
    """One label with its reason in words, and the figures behind it (with units in their names)."""

    label: str
    reason: str
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def phrase(self) -> str:
        """Label and reason in one line."""
        return f"{self.label.replace('_', '-')}: {self.reason}"


@dataclass(frozen=True)
class Conditions:
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
        counters = {name: value for name in _COUNTERS if (value := _amount(row.get(name))) is not None}
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


def _amount(value: Any) -> float | None:
    """A JSON value as a float if it is a finite number of at least 0, and not a boolean."""
    known = (type(value) is float and math.isfinite(value)) or (type(value) is int and value < 1 << 63)
    return float(value) if known and value >= 0 else None
