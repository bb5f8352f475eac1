"""A task's output: events for mlbench, log lines for people. Global facts come only from rank 0."""

import os
import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

from task_images.cache import DataIdentity
from task_images.clock import Snapshot, Tracker, gather_timings
from task_images.contract import anonymize, emit
from task_images.facts import code_facts, machine_facts
from task_images.goals import GoalWatch
from task_images.ranks import Ranks

STEP_INTERVAL = 1.0


class Reporter:
    """Events and log lines of this rank. `data` is the name of the data, `synthetic` whether they are generated."""

    def __init__(self, world: Ranks, data: str, synthetic: bool = False) -> None:
        self._world = world
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
            **(code_facts(contract.method.get("name", "")) if self._world.is_first else {}),
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
        if self._world.is_first:
            emit("phase", 0, phase=phase, **fields)

    def step(self, step: int, steps: int, **fields: Any) -> None:
        """Report progress within an epoch, at most once a second."""
        now = time.monotonic()
        if self._world.is_first and now - self._last_step >= STEP_INTERVAL:
            self._last_step = now
            emit("phase", 0, phase="training", step=step, steps=steps, **fields)

    def metric(self, name: str, value: float, **fields: Any) -> None:
        """Report a value that is equal on all ranks, with epoch, step, unit, seconds as in the contract. Rank 0
        only."""
        if self._world.is_first:
            emit("metric", 0, name=name, value=value, **fields)

    def say(self, line: str) -> None:
        """Log a line for people, from rank 0."""
        if self._world.is_first:
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
        if self._world.is_first:
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
