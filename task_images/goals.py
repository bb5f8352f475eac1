"""Goals: the threshold at which the clock stops, and the other one, reached on the way."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from task_images.clock import Snapshot, Tracker

VALIDATION, ON_TRAINING = ("validation", "training")  # the samples on which accuracy is measured


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
    name = "train_Prec@1" if goal_on == ON_TRAINING else "Prec@1"
    return GoalWatch(name, ">=", full, light, chosen)
