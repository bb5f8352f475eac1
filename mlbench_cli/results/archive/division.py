"""The two divisions of the benchmark, which say which results can be compared.

closed  The task's own program with its preset `spec`. Hardware, number of workers, backend, seed, full or light goal,
        time budget, and the parameters that the task lists as `free` may be chosen, because they do not change the
        mathematics. Results of this division compare systems.
open    The task's data and goal, with any model and training: another preset, a changed parameter, another
        communication method, another image, or a custom command (`mlbench run NAME N --task TASK --command ...`). The
        goal's metric, threshold and validation set must not be changed; for a custom command, mlbench relies on its
        author for that. Results of this division compare ways to train.

A run has no division if it has no goal of a task, if a threshold was changed, or if its data are synthetic, a part of
the official data, or other data. The closed division needs official data: data of unknown origin are open.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from mlbench_cli.model.goals import GOAL_ON, HOLD_OUT
from mlbench_cli.model.spec import CUSTOM, OPEN, RunSpec
from mlbench_cli.results.archive.documents import DataIdentityDocument, DivisionDocument
from mlbench_cli.tasks.catalog import BUDGET, TaskRules

_THRESHOLDS = ("goal_full", "goal_light")


class Code(Enum):
    """Whether the ranks ran the code of the mlbench that recorded the run, judged by the digests of both."""

    SAME = "the task's code"
    OTHER = "another version of the task's code"
    UNKNOWN = "code not known to be the task's"


@dataclass(frozen=True)
class Division:
    """`word` is "closed", "open" or None; `reason` says why it is not closed."""

    word: str | None
    reason: str | None = None

    def to_dict(self) -> DivisionDocument:
        """The division's entry in result.json."""
        return {"word": self.word, "reason": self.reason}


def find_division(
    spec: RunSpec,
    rules: TaskRules | None,
    synthetic: bool,
    data: DataIdentityDocument | None,
    code: Code = Code.SAME,
) -> Division:
    """The division of a run under `spec` of a task with `rules`.

    `synthetic`: whether its data were generated; `data`: their identity (None: not reported by the task); `code`:
    whether its ranks ran this version of the task.
    """
    if spec.task == CUSTOM:
        return Division(None, "a command without a task's goal")
    if rules is None:
        return Division(None, "a task that this mlbench does not know")
    if rules.goal is None:
        return Division(None, "the task has no goal")
    if changes := list(_changed_thresholds(spec, rules)):
        return Division(None, f"the goal was changed: {', '.join(changes)}")
    if synthetic:
        return Division(None, "the data are synthetic")
    if data is not None and data["official"] is False:
        return Division(None, data["reason"] or "not the official data")
    if spec.preset == OPEN:
        return Division("open", "a command of one's own")
    if rules.origin is not None:
        return Division("open", f"the task is not mlbench's own but of {rules.origin}")
    changes = [*_changes(spec, rules), *([code.value] if code is not Code.SAME else [])]
    if data is None or data["official"] is None:
        reason = data["reason"] if data else None
        changes.append(f"data not known to be official{f' ({reason})' if reason else ''}")
    return Division("open", ", ".join(changes)) if changes else Division("closed")


def _changed_thresholds(spec: RunSpec, rules: TaskRules) -> Iterator[str]:
    for name in _THRESHOLDS:
        if spec.parameters.get(name) != rules.spec[name]:
            yield f"{name} {spec.parameters.get(name)} instead of {rules.spec[name]}"
    usual = rules.spec.get(GOAL_ON)
    if (chosen := spec.parameters.get(GOAL_ON, usual)) != usual:
        yield f"{GOAL_ON} {chosen} instead of {usual}"
    if held_out := spec.parameters.get(HOLD_OUT):
        yield f"{HOLD_OUT} {held_out} instead of 0"


def _changes(spec: RunSpec, rules: TaskRules) -> Iterator[str]:
    if spec.preset != "spec":
        yield f"preset {spec.preset}"
    if spec.faults:
        yield "faults were injected"
    if spec.on_failure:
        yield "failed ranks were started again"
    if spec.method:
        yield f"method {spec.method['name']}"
    for name, value in spec.parameters.items():
        if name not in (*rules.free, BUDGET) and value != rules.preset.get(name):
            yield f"{name} {value} instead of {rules.preset.get(name)}"
    if spec.argv != rules.command:
        yield "another command"
    # Ignore the tag (mlbench's version) and the prefix (the registry to which the image was copied).
    image = None if spec.image is None else spec.image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    if image not in (None, rules.image):
        yield f"image {spec.image}"
