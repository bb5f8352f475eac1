"""Goals: the metric and threshold at which the clock stops, and the arithmetic of values against them."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from msgspec import Struct
from msgspec.structs import asdict

COMPARISONS = (">=", "<=")
KINDS = ("full", "light")
# A task reports a goal "Prec@1" as metric "Prec@1", "val_Prec@1" or "val_global_Prec@1".
PREFIXES = ("", "val_", "val_global_")
TRAINING = "train_"  # prefix of metrics of the training samples
GOAL_ON = "goal_on"  # the parameter that selects the samples of the goal
TIMED_BLOCKS = "blocks"  # the parameter that times blocks of updates instead of training to the goal
HOLD_OUT = "hold_out"  # the parameter that scores on a share of the training samples instead of the validation set
MAX_METRICS = 1000  # names of metrics of a run that are kept: a program may report any number of them
BEST, MEAN = " best", " mean"  # suffixes of a metric's name for these figures; the last value has no suffix
_NAMES = {"Prec@1": "top-1 accuracy", "Prec@5": "top-5 accuracy", "BLEU-Score": "BLEU"}  # as people say them


def name_metric(metric: str) -> str:
    """The usual name of a metric, and of its best value or mean: "top-1 accuracy" for "val_global_Prec@1", "training
    loss, mean" for "train_loss mean"."""
    kind = next((suffix for suffix in (BEST, MEAN) if metric.endswith(suffix)), "")
    reported = metric.removesuffix(kind)
    plain = reported.removeprefix("val_").removeprefix("global_").removeprefix(TRAINING)
    words = _NAMES.get(plain, plain.replace("_", " "))
    if reported.startswith(TRAINING):
        words = f"training {words}"
    elif reported.startswith("val_") and plain not in _NAMES:
        words = f"validation {words}"
    return f"{words},{kind}" if kind else words


class Goal(Struct, frozen=True):
    """`metric` `comparison` `threshold`, for example Prec@1 >= 80."""

    metric: str
    comparison: str
    threshold: float

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names under which a task may report the goal's metric."""
        return metric_names(self.metric)

    def meets(self, value: Any) -> bool:
        """Whether a reported value reaches the threshold; False for anything but a finite number."""
        return is_finite_number(value) and self.distance(value) == 0

    def better(self, value: float, than: float) -> bool:
        """Whether `value` is closer to the goal than `than`, or further beyond it."""
        return value > than if self.comparison == ">=" else value < than

    def distance(self, value: float) -> float:
        """Distance of `value` to the threshold in the metric's unit; 0 if it is reached."""
        gap = self.threshold - value if self.comparison == ">=" else value - self.threshold
        return max(0.0, gap)

    def to_dict(self) -> dict[str, Any]:
        """Metric, comparison and threshold as plain JSON values."""
        return asdict(self)

    @classmethod
    def parse(cls, document: Any) -> "Goal | None":
        """The goal in untrusted JSON; None if a field is missing or has the wrong type."""
        if not isinstance(document, dict) or document.get("comparison") not in COMPARISONS:
            return None
        metric, threshold = document.get("metric"), document.get("threshold")
        if not isinstance(metric, str) or not metric or not is_finite_number(threshold):
            return None
        return cls(metric, document["comparison"], threshold)


class GoalRule(Struct, frozen=True):
    """Metric and comparison of a task's goal; the thresholds are its parameters goal_full and goal_light.

    A task with the parameter `goal_on` can have its goal on the training samples instead of the validation set.
    """

    metric: str
    comparison: str
    wording: str  # of the official result line, with {threshold}

    def find_goal(self, parameters: Mapping[str, Any], kind: str) -> Goal | None:
        """The full or light goal for a run's parameters; None if they have no threshold, or time blocks of updates."""
        if parameters.get(TIMED_BLOCKS):
            return None
        threshold = parameters.get(f"goal_{kind}")
        metric = TRAINING + self.metric if parameters.get(GOAL_ON) == "training" else self.metric
        return Goal(metric, self.comparison, threshold) if is_finite_number(threshold) else None

    def wording_of(self, goal: Goal) -> str:
        """The wording, with {threshold}, of a goal from `find_goal`."""
        return self.wording if goal.metric == self.metric else self.wording.replace("Validation", "Training")


def goal_wording(goal: Mapping[str, Any], template: str | None) -> str:
    """ "80% Top 1 Validation Accuracy" from a task's wording, or "Prec@1 >= 80" if there is none."""
    threshold = f"{goal['threshold']:g}"
    if template is None:
        return f"{goal['metric']} {goal['comparison']} {threshold}"
    return template.replace("{threshold}", threshold)


def metric_names(metric: str) -> tuple[str, ...]:
    """The names under which a task may report a metric, plain name first."""
    return tuple(prefix + metric for prefix in PREFIXES)


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a finite number within the range of a float; booleans are not."""
    kind = type(value)  # exact, and quicker than isinstance: JSON has no subclasses
    if kind is float:
        return math.isfinite(value)
    return kind is int and abs(value) < 1 << 63
