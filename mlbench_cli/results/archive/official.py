"""official_result.txt: the one line that the original benchmark gave, or why there is none."""

from collections.abc import Mapping
from typing import Any

from mlbench_cli.model import Outcome
from mlbench_cli.results.archive.conditions import Conditions
from mlbench_cli.spec import CUSTOM
from task_images.contract import COMPUTE_CATEGORIES

# What a division means is in results/division.py.
_OPEN = "comparable with results of the open division only"


def official_line(result: Mapping[str, Any]) -> str | None:
    """The line of a result.json, without newline, worded as by the original; None without goal.

    "80% Top 1 Validation Accuracy reached in 106.912 seconds, Compute: 52.97 seconds, Communication: ...". Seconds are
    rank 0's: the sum over its training steps, without data wait and validation; parts that are 0 are left out.
    Of a run that spent its time budget: "81.25% Top 1 Validation Accuracy after 7200.125 seconds (budget 7200), ...",
    with seconds on the wall clock of the training, validation included, since that is what a budget is for.
    """
    goal = result["goal"]
    if result["outcome"] == "budget_spent" and goal and goal["last"] is not None:
        value = result_wording(goal, goal["last"])
        seconds = result["task_seconds"]["wall"] or 0.0
        return f"{value} after {seconds:.3f} seconds (budget {result['budget_seconds']:g})" + _parts(result)
    if result["outcome"] != "goal_reached" or not goal or not goal["reached"]:
        return None
    seconds = goal["seconds"]["training"]
    if seconds is None:
        seconds = goal["seconds"]["wall"]
    if seconds is None:
        return f"{goal['wording']} reached"
    return f"{goal['wording']} reached in {seconds:.3f} seconds" + _parts(result)


def _parts(result: Mapping[str, Any]) -> str:
    parts = {
        "Compute": sum(_rank0(result, category) for category in COMPUTE_CATEGORIES),
        "Communication": _rank0(result, "communication"),
        "Metrics Computation": _rank0(result, "metrics"),
        "Pre-processing": _rank0(result, "preprocessing"),
    }
    return "".join(f", {name}: {value} seconds" for name, value in parts.items() if value)


def official_text(result: Mapping[str, Any]) -> str:
    """The content of official_result.txt, which follows from result.json alone."""
    line = official_line(result) or f"No official result: {_reason(result)}."
    if result["synthetic"]:
        line += f"\nThe data were synthetic ({result['data'] or 'unnamed'}): not comparable with figures on real data."
    division = result["division"]
    if division["word"] == "open":
        line += f"\nDivision: open ({division['reason']}), {_OPEN}."
    elif division["word"] is None and result["goal"] and result["task"] != CUSTOM and not result["synthetic"]:
        line += f"\nDivision: none ({division['reason']}), not comparable with official results."
    if result["label"]["word"] == "functional":
        line += f"\nThe result is functional, not a performance measurement: {result['label']['reason']}."
    conditions = result.get("conditions")
    if conditions and conditions["labels"]:
        line += f"\nThe run did not have its machine to itself: {Conditions.from_dict(conditions).phrase}."
    return line + "\n"


def goal_wording(goal: Mapping[str, Any], template: str | None) -> str:
    """ "80% Top 1 Validation Accuracy" from a task's wording, or "Prec@1 >= 80" where there is none."""
    threshold = f"{goal['threshold']:g}"
    if template is None:
        return f"{goal['metric']} {goal['comparison']} {threshold}"
    return template.replace("{threshold}", threshold)


def result_wording(goal: Mapping[str, Any], value: float) -> str:
    """ "81.25% Top 1 Validation Accuracy": the goal's wording with a value in the threshold's place."""
    if goal["wording"] == goal_wording(goal, None):
        return f"{goal['metric']} of {value:.6g}"
    return str(goal["wording"]).replace(f"{goal['threshold']:g}", f"{value:.6g}", 1)


def _reason(result: Mapping[str, Any]) -> str:
    goal, outcome = result["goal"], result["outcome"]
    if not Outcome(outcome).is_success:
        reason = f"the run {Outcome(outcome).phrase}"
        if outcome == Outcome.FAILED:
            reason += f" with exit code {result['exit_code']}" if result["exit_code"] is not None else ""
            reason += f", rank {result['first_failed']} first" if result["first_failed"] is not None else ""
        return reason
    if goal is None:
        return "the run completed, and it has no goal"
    if goal["value"] is None:
        return f'the goal "{goal["wording"]}" was not reached'
    return f'the goal "{goal["wording"]}" was not reached, {goal["metric"]} came to {goal["value"]:g}'


def _rank0(result: Mapping[str, Any], category: str) -> float:
    spread = result["timings"].get(category)
    return spread["rank0"] if spread else 0.0
