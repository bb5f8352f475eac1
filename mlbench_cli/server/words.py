"""Formatting for the dashboard's pages: outcomes and progress in words, ratios."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from mlbench_cli.model.goals import BEST, MEAN, name_metric
from mlbench_cli.model.run import JsonObject
from mlbench_cli.results.analysis.numbers import SECONDS, format_value, unit_of
from mlbench_cli.results.analysis.stats import EstimateDocument
from mlbench_cli.results.figures.svg import render_ratio
from mlbench_cli.runs.progress import ESTIMATING, format_eta
from mlbench_cli.runs.snapshot import group_conditions
from mlbench_cli.util.text import counted, rough_duration

TONES = {
    **dict.fromkeys(("goal_reached", "completed", "budget_spent"), "good"),
    **dict.fromkeys(("failed", "deadline", "lost", "never_started", "damaged"), "bad"),
    **dict.fromkeys(("goal_missed", "canceled"), "warn"),
    "running": "live",
}
_FIGURES = {"run": "whole run", "seconds": "time to goal or end", "training": "training alone"}
MAX_METRICS = 2  # in the row of a run without a goal


def add_filters(environment: Environment) -> None:
    """Add the filters of the dashboard's templates."""
    environment.filters |= {
        "words": say,
        "tone": lambda word: TONES.get(str(word), ""),
        "progress_share": progress_share,
        "progress_words": progress_words,
        "eta_words": eta_words,
        "round_time": lambda seconds: format_value(float(f"{seconds:.1g}"), SECONDS),
        "figure_name": lambda name: _FIGURES.get(name) or name_metric(name),
        "ratio_strip": draw_ratio,
        "plain": plain_value,
        "metrics": list_metrics,
        "by_label": group_conditions,
    }
    environment.tests["summary"] = lambda name: name.endswith((BEST, MEAN))


def say(word: object) -> str:
    """ "goal reached" for "goal_reached"."""
    return str(word).replace("_", " ")


def list_metrics(metrics: Mapping[str, Any] | None) -> str:
    """ "loss 0.265, accuracy 96.8": the first metrics of a program without a goal."""
    shown = list((metrics or {}).items())[:MAX_METRICS]
    return ", ".join(f"{name_metric(name)} {format_value(value, unit_of(name))}" for name, value in shown)


def plain_value(value: object) -> str:
    """A setting as text; a dash for nothing, yes and no for a switch."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(plain_value, value)))
    return str(value)


def progress_share(run: JsonObject) -> float | None:
    """The completed share, from 0 to 1, of the way to the goal or of the epochs; None if unknown."""
    progress = run.get("progress") or {}
    elapsed, eta = progress.get("elapsed"), progress.get("eta")
    if elapsed and eta:
        return round(min(0.99, float(elapsed) / float(elapsed + eta)), 3)
    epoch, epochs = progress.get("epoch"), progress.get("epochs")
    return round(min(1.0, float(epoch) / float(epochs)), 3) if epoch and epochs else None


def progress_words(run: JsonObject) -> str:
    """ "training, epoch 3 of 20, top-1 accuracy 71.3 % of 80, 26 s so far"."""
    progress, goal = run.get("progress") or {}, run.get("goal")
    words = [str(progress.get("phase") or ("running" if run.get("metrics") else "starting"))]
    for name, most in (("epoch", "epochs"), ("step", "steps")):
        if progress.get(name) is not None:
            words.append(f"{name} {progress[name]:.10g}" + (f" of {progress[most]:.10g}" if progress.get(most) else ""))
    if goal and goal.get("value") is not None:
        value = format_value(goal["value"], unit_of(goal["metric"]))
        words.append(f"{name_metric(goal['metric'])} {value} of {goal['threshold']:g}")
    if progress.get("elapsed"):
        words.append(f"{rough_duration(progress['elapsed'])} so far")
    return ", ".join(words)


def eta_words(run: JsonObject) -> str:
    """ "about 4 min left", or "estimating time left" as long as that is not known well enough."""
    progress = run.get("progress") or {}
    return format_eta(progress.get("eta"), progress.get("eta_high")) or ESTIMATING


def live_words(run: JsonObject) -> JsonObject:
    """What the page of a run says while it is in progress, as at first."""
    return {
        "progress": progress_words(run),
        "eta": eta_words(run),
        "share": progress_share(run),
        "metrics": {name: format_value(value, unit_of(name)) for name, value in (run.get("metrics") or {}).items()},
    }


def draw_ratio(document: EstimateDocument | None) -> Markup | str:
    """The ratio B / A of a figure with its interval, from 1/2 to 2."""
    return Markup(render_ratio(document["mean"], document["low"], document["high"])) if document else ""  # numbers only


def group_repeats(document: JsonObject) -> list[JsonObject]:
    """The rows of a list of runs, of the document of `mlbench status`: repeats of one setting share a row, which has
    their mean and the name that stands for all of them."""
    family = {
        name: each
        for each in document["repeats"]
        if "(" not in each["name"]  # the repeats differ in what their experiment does not fix
        for name in (*each["counted"], *each["left_out"])
    }
    rows: dict[str, list[JsonObject]] = {}
    for run in document["runs"]:
        rows.setdefault(family.get(run["name"], run)["name"], []).append(run)
    return [_together(name, runs, family[runs[0]["name"]]) if len(runs) > 1 else runs[0] for name, runs in rows.items()]


def _together(name: str, runs: Sequence[JsonObject], found: JsonObject) -> JsonObject:
    phrases = dict.fromkeys(phrase for run in runs for phrase in run["conditions"] or ())
    same = {"name": name, "repeats": runs, "mean": found["seconds"], "conditions": [*phrases]}
    same["metrics"] = {name: each["last"]["mean"] for name, each in found["metrics"].items() if "last" in each}
    good = next((run for run in runs if run["name"] in found["counted"]), runs[0])
    if good.get("goal") and found["metric"]:
        same["goal"] = {**good["goal"], "value": found["metric"]["mean"], "last": found["metric"]["mean"]}
    outcomes = list(dict.fromkeys(run["outcome"] or run["state"] for run in runs))
    return {**good, **same, "outcomes": outcomes}


# What a list of runs can be sorted by: the key of a row.
SORTS: Mapping[str, Callable[[JsonObject], Any]] = {
    "run": lambda row: row["name"],
    "method": lambda row: row["method"] or "",
    "workers": lambda row: row["workers"],
    "time": lambda row: row["mean"]["mean"] if row.get("mean") else row["seconds"],
    "outcome": lambda row: row["outcome"] or row["state"],
    "task": lambda row: row["title"],
    "where": lambda row: row["cluster"],
    "created": lambda row: row["created"],
}


def arrange(rows: Sequence[JsonObject], sort: str) -> list[JsonObject]:
    """Rows in groups: those of an experiment with several under its name, in the order of the rows; or, by a key of
    SORTS, all in one, those without a value last."""
    if sort:
        key = SORTS[sort.removeprefix("-")]
        known = sorted((row for row in rows if key(row) is not None), key=key, reverse=sort.startswith("-"))
        return [{"experiment": None, "runs": [*known, *(row for row in rows if key(row) is None)]}]
    several = Counter(row.get("experiment") for row in rows)
    groups: list[JsonObject] = []
    named: dict[str, JsonObject] = {}
    for row in rows:
        name = row.get("experiment")
        name = name if name and several[name] > 1 else None
        group = groups[-1] if name is None and groups and groups[-1]["experiment"] is None else named.get(name or "")
        if group is None:
            group = {"experiment": name, "runs": []}
            groups.append(group)
            named |= {name: group} if name else {}
        group["runs"].append(row)
    return groups


def facts_of(status: JsonObject, result: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The facts below the name of a run: (name, text)."""
    workers = counted(status["workers"], "worker")
    where = "this machine" if status["cluster"] == "local" else status["cluster"]
    division = (result or {}).get("division") or {}
    found = [
        (
            "Task" if status["title"] == status["task"] else "Command",
            status["title"] + ("" if status["preset"] in ("spec", "custom") else f", preset {status['preset']}"),
        ),
        *([("Method", status["method"])] if status["method"] else []),
        ("Workers", f"{workers} on {where}, {status['backend']}, {status['device']}"),
        ("Network", status.get("measured_network") or status["network"] or "not shaped"),
    ]
    if result is not None:
        found.append(("Division", division.get("word") or "none"))
    return found
