"""Goals: the threshold at which the clock stops, and the other one that is passed on the way."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from task_images.harness.tracker import Snapshot, Tracker

VALIDATION, ON_TRAINING = ("validation", "training")  # the samples that an accuracy is of


@dataclass(frozen=True)
class GoalPassed:
    """The first time that a threshold was met: by which value, in which epoch, and the tracker's figures until then."""

    value: float
    epoch: int
    snapshot: Snapshot


class GoalWatch:
    """Looks at every value of the goal's metric. `comparison` is ">=" or "<="; `chosen` is "full" or "light".

    A value that is not finite never meets a goal.
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
        """Whether the chosen threshold has been met."""
        return self.chosen in self.passages

    def observe(self, value: float, epoch: int, tracker: Tracker) -> bool:
        """Take note of `value`; True when the chosen goal is reached, now or before. Call it with a value that all
        ranks agree on."""
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
        """The result event's `goal`: the value is that which reached the goal, or the best there was; and the last."""
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
        """For a checkpoint: what was reached so far, with the clock at that time."""
        return {"best": self.best, "last": self.last, "passages": {k: asdict(v) for k, v in self.passages.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. A passage counts only for the threshold of this run."""
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

    The latter is the share of hits since the last validation, each sample as augmented and by the model that was about
    to learn from it. It costs nothing, and is what MLBench 3 reported as training accuracy.
    """
    name = "train_Prec@1" if goal_on == ON_TRAINING else "Prec@1"
    return GoalWatch(name, ">=", full, light, chosen)
