"""What a fabric costs trainings and what it gives collectives, in the ten sections of the draft's reporting form.

Source: draft-calabria-bmwg-ai-fabric-training-bench, individual, not adopted; its formulas per update, so that runs of
different lengths compare:

    roofline    C + 8 S f / B     C seconds of computation, S bytes that a rank gives to the collectives,
                                  f = 2 (n - 1) / n, B bits per second
    JCT ratio   J / roofline      J seconds of training
    overlap     1 - (J - C) / (8 S f / B)
    recovery    from the return of a failed or slowed link to the next finished update
    fairness    (sum x)^2 / (n sum x^2), Jain's index, over x = time alone / time beside others

C is measured: the same training by the method `noop`, which sends nothing. The roofline is sequential, so a training
that hides its communication may be below it. Only the endpoints are observed, the draft's class (c).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.faults import FaultKind
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.results.analysis.collectives import read_rows
from mlbench_cli.results.analysis.comparability import key_of
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.overlap import read_overlap
from mlbench_cli.storage.run_folder import FAULTS
from mlbench_cli.util.json_text import parse_document

DRAFT = "draft-calabria-bmwg-ai-fabric-training-bench"
NOT_OBSERVED = "not observed: switches, so ECN, PFC, drops, buffers and the balance of links"
_NO_DIFFERENCE = ("method", "division", "goal", "settings")  # that a reference may have


@dataclass(frozen=True)
class Job:
    """One training. Seconds per update; None where the reference or the network's rate is missing.

    `spans_overlap` is the share of the messages' time in which the training went on, by the spans of rank 0.
    """

    run: str
    method: str
    ranks: int
    updates: int
    seconds: float
    payload_bytes: float
    access_bits_per_second: float | None
    access: str
    compute_seconds: float | None = None
    roofline_seconds: float | None = None
    jct_ratio: float | None = None
    overlap: float | None = None
    spans_overlap: float | None = None
    interference: float | None = None


@dataclass(frozen=True)
class LinkFault:
    """A link that was changed during a training (--faults), and what its updates saw. Seconds; None: not known.

    at, down   since the first rank started, and for how long; `down` is None if it lasted to the end
    gap        between the last update reported before the link changed and the first one after its return. Updates are
               reported at most once a second, so a gap of about a second is none
    recovery   from the link's return to the next reported update
    """

    run: str
    worker: int | None
    at: float
    down: float | None
    gap: float | None
    recovery: float | None


@dataclass(frozen=True)
class FabricReport:
    """Trainings and collectives of some runs. `collectives` are rows of the task, with bandwidths at percentiles."""

    jobs: tuple[Job, ...]
    collectives: tuple[Mapping[str, Any], ...]
    links: tuple[LinkFault, ...]
    fairness: float | None
    hosts: tuple[str, ...]
    excluded: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as the draft orders it."""
        return {
            "draft": DRAFT,
            "dut": "the network between the ranks, from endpoint to endpoint",
            "topology": NOT_OBSERVED,
            "configuration": sorted(
                {f"{job.method}, {job.ranks} ranks, access rate {job.access}" for job in self.jobs}
            ),
            "observation_points": "class (c), endpoint software",
            "hosts": list(self.hosts),
            "results": {
                "jobs": [asdict(job) for job in self.jobs],
                "collectives": [dict(row) for row in self.collectives],
                "link_faults": [asdict(link) for link in self.links],
                "fairness": self.fairness,
            },
            "anomalies": list(self.excluded),
            "trials": {"counted": len(self.jobs) + bool(self.collectives), "excluded": len(self.excluded)},
            "repeatability": "mlbench compare gives intervals over repeats",
            "comparability": "equal ranks, access rate, collective, S, f and transport; see mlbench compare",
        }


def report_fabric(
    archives: Sequence[Archive], compute: Archive | None, alone: Archive | None, rate: float | None
) -> FabricReport:
    """The report on verified archives.

    compute  the training by the method noop, alone  the training without another beside it; None: not known
    rate     of a rank's access to the network, bits per second; None: as the run's probe measured it

    Raises UsageError for a reference that is not one.
    """
    jobs, rows, links, excluded = [], [], [], []
    for archive in archives:
        links += find_link_faults(archive)
        if archive.run["spec"]["task"] == "allreduce":
            rows += [_with_bandwidths(row, str(archive.run["name"])) for row in read_rows(archive)]
        elif (job := _measure(archive, compute, alone, rate)) is not None:
            jobs.append(job)
        else:
            excluded.append(f"{archive.run['name']}: no training with more than one rank that says what it sent")
    shares = [1 / job.interference for job in jobs if job.interference]
    fair = sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) if len(shares) > 1 else None
    hosts = {str(key_of(archive).machine or "unknown") for archive in archives}
    return FabricReport(tuple(jobs), tuple(rows), tuple(links), fair, tuple(sorted(hosts)), tuple(excluded))


def find_link_faults(archive: Archive) -> list[LinkFault]:
    """The links that were changed while this run trained."""
    facts: Any = archive.result.get("faults")
    events = [] if facts is None else [event for event in facts["events"] if event[0] == FaultKind.LINK]
    if not events:
        return []
    record: Any = parse_document(archive.read(FAULTS))
    began = float(record["began"])
    moments = [event["time"] - began for event in archive.events(0) if event["event"] == "phase" and "step" in event]
    found = []
    for _, worker, at, until in events:
        before = max((moment for moment in moments if moment <= at), default=None)
        after = None if until is None else min((moment for moment in moments if moment >= until), default=None)
        found.append(
            LinkFault(
                run=str(archive.run["name"]),
                worker=worker,
                at=at,
                down=None if until is None else until - at,
                gap=None if before is None or after is None else after - before,
                recovery=None if after is None else after - until,
            )
        )
    return found


def _measure(archive: Archive, compute: Archive | None, alone: Archive | None, rate: float | None) -> Job | None:
    result: Any = archive.result
    seconds, ranks = _update_seconds(archive), int(result["world_size"])
    sent = (result.get("details") or {}).get("communication")
    if seconds is None or ranks < 2 or not isinstance(sent, Mapping) or not is_finite_number(sent.get("bytes")):
        return None
    network: Mapping[str, Any] = result.get("network") or {}
    measured = network.get("together_bits_per_second") or network.get("alone_bits_per_second")
    access = rate or measured
    spans = read_overlap(archive)
    moving = spans.hidden + spans.exposed if spans is not None else 0.0
    size = float(sent["bytes"]) / float(result["updates"])
    facts: dict[str, Any] = {}
    if compute is not None:
        _check(archive, compute, "--compute")
        facts["compute_seconds"] = computing = _update_seconds(compute) or 0.0
        if access:
            wire = 8 * size * 2 * (ranks - 1) / ranks / access
            facts["roofline_seconds"] = computing + wire
            facts["jct_ratio"] = seconds / (computing + wire)
            facts["overlap"] = 1 - (seconds - computing) / wire if wire else None
    if alone is not None:
        _check(archive, alone, "--alone")
        facts["interference"] = seconds / (_update_seconds(alone) or seconds)
    return Job(
        run=str(archive.run["name"]),
        method=str((archive.run["spec"].get("method") or {}).get("name", "the task's own")),
        ranks=ranks,
        updates=int(result["updates"]),
        seconds=seconds,
        payload_bytes=size,
        access_bits_per_second=access,
        access="given" if rate else "measured by the run's probe" if measured else "unknown",
        spans_overlap=spans.hidden / moving if spans is not None and moving else None,
        **facts,
    )


def _update_seconds(archive: Archive) -> float | None:
    """Seconds of training, without validation, per update."""
    training, updates = archive.result["task_seconds"].get("training"), archive.result["updates"]
    if not is_finite_number(training) or not is_finite_number(updates) or training <= 0 or updates <= 0:
        return None
    return float(training) / float(updates)


def _check(archive: Archive, reference: Archive, option: str) -> None:
    """Raise UsageError if the two differ in more than the method, the goal and what is beside them."""
    name, other = archive.run["name"], reference.run["name"]
    if _update_seconds(reference) is None:
        raise UsageError(f"{option} {other}: it is not a finished training.")
    if archive.result["world_size"] != reference.result["world_size"]:
        raise UsageError(f"{option} {other}: it has another number of ranks than {name}.")
    method = str((reference.run["spec"].get("method") or {}).get("name"))
    if option == "--compute" and method != "noop":
        raise UsageError(f"{option} {other}: it communicates.", hint="The same training with --method noop.")
    different = [found for found in key_of(reference).differences(key_of(archive)) if found.word not in _NO_DIFFERENCE]
    if different:
        raise UsageError(f"{option} {other} cannot be the reference for {name}. {different[0].phrase}")


def _with_bandwidths(row: Mapping[str, Any], run: str) -> dict[str, Any]:
    """A row with the bus bandwidth at the mean and the percentiles of the time, GB/s."""
    kept = {name: row.get(name) for name in ("collective", "dtype", "place", "bytes", "samples")}
    for name in ("mean", "p50", "p95", "p99"):
        time = row.get(f"{name}_us")
        known = is_finite_number(time) and is_finite_number(row.get("busbw")) and is_finite_number(row.get("p50_us"))
        kept[f"busbw_at_{name}_time"] = row["busbw"] * row["p50_us"] / time if known and time else None
    return {"run": run, **kept}
