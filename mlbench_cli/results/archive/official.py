"""official_result.txt: the single line of the original benchmark, or the reason why there is none."""

import math
from collections.abc import Mapping
from typing import Any

from mlbench_cli.model.goals import goal_wording
from mlbench_cli.model.network import network_phrase
from mlbench_cli.model.run import Outcome
from mlbench_cli.model.spec import CUSTOM
from mlbench_cli.results.archive.conditions import Conditions
from task_images.contract import COMPUTE_CATEGORIES, MIXED_CATEGORIES

# What a division means is in results/division.py.
_OPEN = "comparable with results of the open division only"


def official_line(result: Mapping[str, Any]) -> str | None:
    """The line of a result.json, without newline; None without goal.

    "80% Top 1 Validation Accuracy reached in 150.2 seconds (training steps: 106.912), Compute: 52.97 seconds, ...".
    Seconds are rank 0's wall clock from the first training step to the goal, including validation and waiting for data;
    in parentheses the sum over its training steps only, which MLBench 3 reported. Parts that are 0 are omitted. For a
    run with a time budget: "81.25% Top 1 Validation Accuracy after 7204.125 seconds (budget 7200, then the last
    validation), ...". Also None if findings remove the line (`doubts`).
    """
    goal, parts = result["goal"], _parts(result)
    if result.get("doubts"):
        return None
    if result["outcome"] == "budget_spent" and goal and goal["last"] is not None:
        value = result_wording(goal, goal["last"])
        seconds = result["task_seconds"]["wall"] or 0.0
        budget = result["budget_seconds"]  # None if a custom command did not report it
        spent = f" (budget {budget:g}, then the last validation)" if budget else ""
        return f"{value} after {seconds:.3f} seconds{spent}{parts}"
    if result["outcome"] != "goal_reached" or not goal or not goal["reached"]:
        return None
    wall, training = goal["seconds"]["wall"], goal["seconds"]["training"]
    seconds = training if wall is None else wall
    if seconds is None:
        return f"{goal['wording']} reached"
    steps = f" (training steps: {training:.3f})" if training is not None else ""
    return f"{goal['wording']} reached in {seconds:.3f} seconds{steps}" + parts


def _parts(result: Mapping[str, Any]) -> str:
    mixed = math.fsum(_rank0(result, category) for category in MIXED_CATEGORIES.values())
    computing = math.fsum(_rank0(result, category) for category in COMPUTE_CATEGORIES) + mixed
    parts = {
        "Compute and Communication" if mixed else "Compute": computing,
        "Communication": _rank0(result, "communication"),
        "Metrics Computation": _rank0(result, "metrics"),
        "Pre-processing": _rank0(result, "preprocessing"),
    }
    texts = {name: f"{value:.3f}" for name, value in parts.items()}
    return "".join(f", {name}: {text} seconds" for name, text in texts.items() if float(text))


def official_text(result: Mapping[str, Any]) -> str:
    """The content of official_result.txt, derived only from result.json."""
    line = official_line(result) or f"No official result: {_reason(result)}."
    if result["synthetic"]:
        line += f"\nThe data were synthetic ({result['data'] or 'unnamed'}): not comparable with figures on real data."
    data = result.get("data_identity")
    if data is not None and data["official"] is False and not result["synthetic"]:
        line += f"\nThe data were not the official ones ({data['reason']}): not comparable with official results."
    division = result["division"]
    if division["word"] == "open":
        line += f"\nDivision: open ({division['reason']}), {_OPEN}."
    elif division["word"] is None and result["goal"] and result["task"] != CUSTOM and not _has_other_data(result):
        line += f"\nDivision: none ({division['reason']}), not comparable with official results."
    if result["label"]["word"] == "functional":
        line += f"\nThe result is functional, not a performance measurement: {result['label']['reason']}."
    if method := result.get("method"):
        line += f"\nMethod of communication: {method}, not the task's own."
    network = result.get("network")
    if network and (phrase := network_phrase(network)):
        line += f"\nNetwork between the ranks: {phrase}."
    conditions = result.get("conditions")
    if conditions and conditions["labels"]:
        line += f"\nThe run did not have its machine to itself: {Conditions.from_dict(conditions).phrase}."
    return line + "\n"


def _has_other_data(result: Mapping[str, Any]) -> bool:
    data = result.get("data_identity")
    return bool(result["synthetic"] or (data is not None and data["official"] is False))


def result_wording(goal: Mapping[str, Any], value: float) -> str:
    """ "81.25% Top 1 Validation Accuracy": the goal's wording with a value instead of the threshold."""
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
    if result.get("doubts"):
        return f"its evidence is in doubt ({', '.join(result['doubts'])}; findings.json says why)"
    if goal is None:
        return "the run completed, and it has no goal"
    if goal["value"] is None:
        return f'the goal "{goal["wording"]}" was not reached'
    return f'the goal "{goal["wording"]}" was not reached, {goal["metric"]} came to {goal["value"]:g}'


def _rank0(result: Mapping[str, Any], category: str) -> float:
    spread = result["timings"].get(category)
    return spread["rank0"] if spread else 0.0
