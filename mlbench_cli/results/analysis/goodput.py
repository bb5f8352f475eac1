"""Goodput: how much of a run's time went into the result, beside what the published formula expects.

    goodput = useful samples x time of a sample without faults / wall time of all attempts

With a reference run (no faults; same method, ranks and settings) the time of a sample is the reference's. Without one
it is the run's own, over the work that its result rests on, and slow ranks do not show.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.model.faults import best_interval, expected_ettr
from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.results.analysis.comparability import key_of
from mlbench_cli.results.archive.reader import Archive

# Settings by which a faulted run may differ from its reference.
_FAULT_SETTINGS = ("faults", "on_failure", "checkpoint_every", "detect_seconds")


@dataclass(frozen=True)
class Goodput:
    """One run. Shares are of the wall time; times in seconds; None: not known.

    value      goodput by the reference, else by the run's own time of a sample
    parts      seconds by part of the run (archive/faults.py)
    mtbf       measured mean time between attempts that ended early, over the time that trained
    interval   measured mean time between checkpoints
    ettr       E[ETTR] by the formula, from the measured mtbf, cost of a checkpoint, interval and restart
    best       the interval between checkpoints that Daly's formula gives for these figures
    """

    name: str
    is_referenced: bool
    value: float | None
    wall: float
    parts: Mapping[str, float]
    faults: int
    restarts: int
    recovery: float | None
    mtbf: float | None
    interval: float | None
    ettr: float | None
    best: float | None

    @property
    def after_startup(self) -> float | None:
        """The useful share of the time after start-up, which predictions leave out."""
        seconds = self.wall - self.parts["startup"]
        return self.parts["useful"] / seconds if seconds > 0 else None


def has_faults(archive: Archive) -> bool:
    """Whether the archive has a record of faults and attempts."""
    return isinstance(archive.result.get("faults"), Mapping)


def measure_goodput(archive: Archive, reference: Archive | None = None) -> Goodput:
    """The goodput of a run with a record of faults. Raises UsageError if there is none, or if the reference differs."""
    facts: Any = archive.result.get("faults")
    name = str(archive.result["run"])
    if not isinstance(facts, Mapping):
        raise UsageError(
            f"{name} has no record of faults and attempts.",
            hint="mlbench run NAME 2 --task digits_resnet --faults 'every ~60s kill any rank' --on-failure restart",
        )
    parts, wall = facts["seconds"], float(facts["wall_seconds"])
    recoveries = facts["recoveries"]
    useful = parts["useful"]
    value = facts["goodput"]
    if reference is not None:
        _check_reference(archive, reference)
        value = _value_by_reference(archive, reference, wall)
    restarts = int(facts["attempts"]) - 1
    trained = useful + parts["checkpointing"] + parts["waiting"] + parts["lost"]
    mtbf = trained / restarts if restarts and trained else None
    cost = facts["checkpoint_seconds"]
    kept = int(facts["checkpoints"])
    interval = trained / kept if kept and trained else mtbf
    ettr = best = None
    if mtbf is not None and interval is not None and cost is not None and recoveries:
        restart = sum(each["detection"] + each["restart"] + each["loading"] for each in recoveries) / len(recoveries)
        ettr, best = expected_ettr(mtbf, max(cost, 1e-6), interval, restart), best_interval(max(cost, 1e-6), mtbf)
    return Goodput(
        name=name,
        is_referenced=reference is not None,
        value=value,
        wall=wall,
        parts=dict(parts),
        faults=int(facts["injected"]),
        restarts=restarts,
        recovery=sum(each["seconds"] for each in recoveries) / len(recoveries) if recoveries else None,
        mtbf=mtbf,
        interval=interval,
        ettr=ettr,
        best=best,
    )


def _check_reference(archive: Archive, reference: Archive) -> None:
    if has_faults(reference) and reference.result["faults"]["injected"]:
        raise UsageError(
            f"{reference.result['run']} had faults itself, so it cannot be the reference.",
            hint="Use a run without --faults.",
        )
    differences = [
        difference
        for difference in key_of(reference).differences(key_of(archive))
        if difference.word != "division" and difference.name.removeprefix("values of ") not in _FAULT_SETTINGS
    ]
    if archive.result["world_size"] != reference.result["world_size"]:
        raise UsageError(f"{reference.result['run']} has another number of ranks than {archive.result['run']}.")
    if differences:
        raise UsageError(
            f"{reference.result['run']} cannot be the reference for {archive.result['run']}. {differences[0].phrase}",
            hint="Use a run that differs only in --faults, --on-failure, --checkpoint-every and --detect.",
        )


def _value_by_reference(archive: Archive, reference: Archive, wall: float) -> float | None:
    samples: Any = archive.result["samples"]
    done: Any = reference.result["samples"]
    seconds: Any = reference.result["task_seconds"]["wall"]
    if not all(is_finite_number(value) and value > 0 for value in (samples, done, seconds, wall)):
        return None
    return float(samples) * float(seconds) / float(done) / wall
