"""Prometheus metrics of the newest runs in text format. Gauges of finished runs keep their last value."""

from collections.abc import Iterator, Mapping

from mlbench_cli.api import RunHandle
from mlbench_cli.errors import DamagedArchive
from mlbench_cli.model.run import DAMAGED
from mlbench_cli.server.access import count_runs, list_runs
from mlbench_cli.server.config import ServerConfig

MAX_RUNS = 500
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HELP = {
    "mlbench_runs_total": "Runs that this machine knows.",
    "mlbench_run_info": "A run with its outcome; always 1.",
    "mlbench_run_task_seconds": "Seconds that the task took on the wall clock of rank 0.",
    "mlbench_run_goal_value": "The goal's metric when the goal was reached, else the best.",
    "mlbench_run_goal_reached": "Whether the goal was reached.",
    "mlbench_run_phase_seconds": "Seconds of rank 0 by phase.",
}
_Row = tuple[str, Mapping[str, str], float]


def render_metrics(config: ServerConfig) -> str:
    """The text of /metrics: the newest MAX_RUNS runs."""
    rows: list[_Row] = [("mlbench_runs_total", {}, float(count_runs(config)))]
    for handle in list_runs(config, limit=MAX_RUNS):
        rows += _rows_of(handle)
    lines = []
    for name, text in _HELP.items():
        own = [row for row in rows if row[0] == name]
        if own:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", *(format_row(*row) for row in own)]
    return "\n".join(lines) + "\n"


def _rows_of(handle: RunHandle) -> Iterator[_Row]:
    spec = handle.run.spec
    labels = {"run": handle.name, "task": spec.task, "backend": spec.backend, "workers": str(spec.workers)}
    try:
        finished = handle.finished
        outcome = str(finished.outcome) if finished else ""
    except DamagedArchive:
        finished, outcome = None, DAMAGED
    yield "mlbench_run_info", {**labels, "preset": spec.preset, "cluster": spec.cluster, "outcome": outcome}, 1.0
    result = finished.result if finished else None
    if result is None:
        return
    if result["task_seconds"]["wall"] is not None:
        yield "mlbench_run_task_seconds", labels, result["task_seconds"]["wall"]
    if result["goal"]:
        yield "mlbench_run_goal_reached", labels, float(result["goal"]["reached"])
        if result["goal"]["value"] is not None:
            yield "mlbench_run_goal_value", {**labels, "metric": result["goal"]["metric"]}, result["goal"]["value"]
    for phase, spread in result["timings"].items():
        yield "mlbench_run_phase_seconds", {**labels, "phase": phase}, spread["rank0"]


def format_row(name: str, labels: Mapping[str, str], value: float) -> str:
    """One sample; label values are escaped."""
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
