"""What a run says of itself: which data it used, whether it reached its goal, events for mlbench, lines for people.

Global facts come only from rank 0.
"""

import hashlib
import math
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from task_images.clock import Snapshot, Tracker, gather_timings
from task_images.contract import Contract, anonymize, emit
from task_images.facts import code_facts, machine_facts
from task_images.world import GROUP_SECONDS, World, open_world

# Published means were computed in single precision, so their seventh digits differ.
MEAN_TOLERANCE = 2e-6


@dataclass(frozen=True)
class DataIdentity:
    """The data's identity in the result event.

    counts     part -> number of samples (or words, or sentence pairs), as used
    digest     "sha256:HEX" of the decoded data; None for generated data
    official   True: the published data set; False: other data; None: unknown
    reason     why the data are not, or not known to be, the official ones; None if they are
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    digest: str | None = None
    official: bool | None = None
    reason: str | None = "the task does not report which data it trained on"

    def to_dict(self) -> dict[str, object]:
        """The entry of the result event."""
        return {**asdict(self), "counts": dict(self.counts)}


def digest_arrays(*arrays: npt.NDArray[np.generic]) -> str:
    """ "sha256:HEX" of the shapes, types and values of `arrays`."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(f"{array.dtype.str} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).view(np.uint8).data)
    return f"sha256:{sha.hexdigest()}"


def made_up(counts: Mapping[str, int]) -> DataIdentity:
    """The identity of generated data."""
    return DataIdentity(counts, None, False, "the data were generated")


def find_other_means(images: npt.NDArray[np.uint8], means: Sequence[float]) -> str | None:
    """Describe how the channel means of images [n, channels, height, width] (bytes) differ from the published `means`
    (from 0 to 1); None if they do not."""
    sums = images.sum(axis=(0, 2, 3), dtype=np.int64)
    found = sums / (255 * (images.size // images.shape[1]))
    if np.allclose(found, means, rtol=0, atol=MEAN_TOLERANCE):
        return None
    there, published = (", ".join(f"{mean:.6f}" for mean in some) for some in (found, means))
    return f"the mean of their pixels is {there} instead of {published}"


def compare_data(
    counts: Mapping[str, int],
    expected: Mapping[str, int],
    digest: str | None,
    official_digest: str | None = None,
    find_difference: Callable[[], str | None] | None = None,
) -> DataIdentity:
    """Compare data with the published counts and, if known, the published digest. If the counts match,
    `find_difference` looks for other differences."""
    off = [f"{counts.get(part, 0)} {part} instead of {number}" for part, number in expected.items()
           if counts.get(part, 0) != number]  # fmt: skip
    if off:
        kind = "a part of the official data" if _is_part(counts, expected) else "not the official data"
        return DataIdentity(counts, digest, False, f"{kind}: {', '.join(off)}")
    if official_digest is not None and digest != official_digest:
        return DataIdentity(counts, digest, False, "not the official data: their digest differs")
    if find_difference is not None and (difference := find_difference()) is not None:
        return DataIdentity(counts, digest, False, f"not the official data: {difference}")
    return DataIdentity(counts, digest, True, None)


def _is_part(counts: Mapping[str, int], expected: Mapping[str, int]) -> bool:
    return all(0 < counts.get(part, 0) <= number for part, number in expected.items())


@dataclass(frozen=True)
class GoalPassed:
    """The first time that a threshold was reached: the value, the epoch, and the tracker's figures up to then."""

    value: float
    epoch: int
    snapshot: Snapshot


class GoalWatch:
    """Watches the goal's metric. `comparison` is ">=" or "<="; `chosen` is "full" or "light".

    Non-finite values never reach a goal.
    """

    def __init__(self, metric: str, comparison: str, full: float, light: float, chosen: str) -> None:
        if comparison not in (">=", "<="):
            raise ValueError(f"the comparison {comparison!r} is neither >= nor <=")
        self.metric = metric
        self.comparison = comparison
        self.thresholds = {"full": full, "light": light}
        self.chosen = chosen
        self.passages: dict[str, GoalPassed] = {}
        self.best: float | None = None
        self.last: float | None = None

    @property
    def threshold(self) -> float:
        """The threshold at which the clock stops."""
        return self.thresholds[self.chosen]

    @property
    def reached(self) -> bool:
        """Whether the chosen threshold has been reached."""
        return self.chosen in self.passages

    def observe(self, value: float, epoch: int, tracker: Tracker) -> bool:
        """Record `value`; True if the chosen goal is reached, now or earlier. All ranks must pass the same value."""
        if not math.isfinite(value):
            return self.reached
        self.last = value
        best = max if self.comparison == ">=" else min
        self.best = value if self.best is None else best(self.best, value)
        for kind, threshold in self.thresholds.items():
            if kind not in self.passages and self._meets(value, threshold):
                self.passages[kind] = GoalPassed(value, epoch, tracker.snapshot())
        return self.reached

    def facts(self) -> dict[str, object]:
        """The `goal` of the result event, with the value that reached the goal, or else the best value; and the last
        value."""
        value = self.passages[self.chosen].value if self.reached else self.best
        return {
            "metric": self.metric,
            "comparison": self.comparison,
            "threshold": self.threshold,
            "kind": self.chosen,
            "value": value,
            "last": self.last,
        }

    def state_dict(self) -> dict[str, object]:
        """For a checkpoint: the thresholds reached so far, with the clock at that time."""
        return {"best": self.best, "last": self.last, "passages": {k: asdict(v) for k, v in self.passages.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint. Only passages of this run's thresholds count."""
        self.best, self.last = state["best"], state["last"]
        self.passages = {
            kind: GoalPassed(passage["value"], passage["epoch"], Snapshot(**passage["snapshot"]))
            for kind, passage in state["passages"].items()
            if self._meets(passage["value"], self.thresholds[kind])
        }

    def _meets(self, value: float, threshold: float) -> bool:
        return value >= threshold if self.comparison == ">=" else value <= threshold


def make_accuracy_goal(full: float, light: float, goal_on: str, chosen: str) -> GoalWatch:
    """The goal of a classification: Prec@1 in percent, of the validation set or of the training samples (`goal_on`).

    Training accuracy is the share of hits since the last validation, on augmented samples, by the model just before it
    learned from each. It costs nothing, and MLBench 3 reported the same.
    """
    name = "train_Prec@1" if goal_on == "training" else "Prec@1"
    return GoalWatch(name, ">=", full, light, chosen)


STEP_INTERVAL = 1.0


class Reporter:
    """Events and log lines of this rank. `data` is the name of the data, `synthetic` whether they are generated."""

    def __init__(self, world: World, data: str, synthetic: bool = False) -> None:
        self._world, self._is_first = world, world.is_first
        self._data = data
        self._synthetic = synthetic
        self._identity = DataIdentity()
        self._last_step = 0.0

    def environment(self, **facts: Any) -> None:
        """Report this rank's environment; rank 0 adds the code and the packages."""
        contract = self._world.contract
        preloaded = os.environ.get("LD_PRELOAD")
        if preloaded:
            facts["variables"] = {"LD_PRELOAD": anonymize(preloaded) if contract.anonymous else preloaded}
        emit(
            "environment",
            contract.rank,
            **self._world.framework_facts(),
            python=platform.python_version(),
            host=None if contract.anonymous else socket.gethostname(),
            threads=self._world.threads,
            backend=self._world.backend,
            world_size=self._world.size,
            seed=contract.seed,
            method=dict(contract.method),
            **machine_facts(),
            **(code_facts(contract.method.get("name", "")) if self._is_first else {}),
            **facts,
        )

    def data_identity(self, identity: DataIdentity) -> None:
        """Set the data's identity for the result; logs a line if they are not the official data."""
        self._identity = identity
        if identity.reason is not None and not self._synthetic:
            self.say(f"data: {identity.reason}")

    def phase(self, phase: str, **fields: Any) -> None:
        """Report the start or progress of a phase, with epoch, epochs, step, steps, goal as in the contract. Rank 0
        only."""
        if self._is_first:
            emit("phase", 0, phase=phase, **fields)

    def step(self, step: int, steps: int, **fields: Any) -> None:
        """Report progress within an epoch, at most once a second."""
        now = time.monotonic()
        if self._is_first and now - self._last_step >= STEP_INTERVAL:
            self._last_step = now
            emit("phase", 0, phase="training", step=step, steps=steps, **fields)

    def metric(self, name: str, value: float, **fields: Any) -> None:
        """Report a value that is equal on all ranks, with epoch, step, unit, seconds as in the contract. Rank 0
        only."""
        if self._is_first:
            emit("metric", 0, name=name, value=value, **fields)

    def say(self, line: str) -> None:
        """Log a line for people, from rank 0."""
        if self._is_first:
            print(line, flush=True)

    def result(
        self,
        tracker: Tracker,
        goal: GoalWatch | None = None,
        details: Mapping[str, Any] | None = None,
        spent: float | None = None,
        end: Snapshot | None = None,
    ) -> None:
        """Report the result event, with timings of all ranks. Every rank must call this; rank 0 reports.

        If the goal was reached, figures are those up to the goal; otherwise those up to now. `details` gets the entry
        "goals": the figures up to each threshold reached. `spent` is the time budget in seconds at which training
        ended, in which case the result is the accuracy reached. `end` is the clock at the end of training; None: now.
        """
        reached = goal is not None and goal.reached and spent is None
        end = goal.passages[goal.chosen].snapshot if goal and reached else end or tracker.snapshot()
        timings = gather_timings(self._world, end)
        details = dict(details or {})
        if facts := self._world.backend_facts():
            details["backend"] = facts
            if self._world.backend == "nccl":  # per rank, because one that fell back to TCP slows all others
                emit("environment", self._world.contract.rank, nccl=facts)
        if goal:
            details["goals"] = {
                kind: _passage(goal.thresholds[kind], passage.value, passage.epoch, passage.snapshot)
                for kind, passage in goal.passages.items()
            }
        outcome = "completed" if goal is None else "goal_reached" if goal.reached else "goal_missed"
        if spent is not None:
            outcome = "budget_spent"
        if self._is_first:
            emit(
                "result",
                0,
                outcome=outcome,
                goal=goal.facts() if goal else None,
                budget_seconds=spent,
                wall_seconds=end.wall,
                training_seconds=end.training,
                timings=timings,
                updates=end.updates,
                samples=end.samples,
                epochs=end.epoch,
                synthetic=self._synthetic,
                data=self._data,
                data_identity=self._identity.to_dict(),
                details=details,
            )


def _passage(threshold: float, value: float, epoch: int, snapshot: Snapshot) -> dict[str, object]:
    return {
        "threshold": threshold,
        "value": value,
        "epoch": epoch,
        "wall_seconds": snapshot.wall,
        "training_seconds": snapshot.training,
        "updates": snapshot.updates,
        "samples": snapshot.samples,
        "seconds": snapshot.seconds,
    }


@contextmanager
def training_session(
    contract: Contract, data: str, synthetic: bool = False, collective_seconds: float = GROUP_SECONDS
) -> Iterator[tuple[World, Reporter]]:
    """Rendezvous with the other ranks and report the environment, before data are loaded; leave together after success.

    data                 name of the data set; synthetic: whether it is generated
    collective_seconds   timeout of collectives, see open_world
    """
    world = open_world(contract, collective_seconds=collective_seconds)
    report = Reporter(world, data=data, synthetic=synthetic)
    report.environment()
    report.phase("loading")
    yield world, report
    world.close()
