"""`mlbench status`: what the runs do."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, complete_clusters, complete_tasks, engine_of_run
from mlbench_cli.commands._experiments import ExperimentStatus, experiment_status, is_queue_problem, show_experiment
from mlbench_cli.commands._repeats import repeats_in, show_repeats
from mlbench_cli.commands._report import Reporter, format_eta, in_words
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.durations import parse_since
from mlbench_cli.errors import MlbenchError, UsageError, did_you_mean
from mlbench_cli.model import Outcome, Run, RunRow, RunState
from mlbench_cli.runs.finished import read_finished
from mlbench_cli.runs.select import Selection, select
from mlbench_cli.runs.snapshot import (
    ENDED,
    UNKNOWN,
    RunStatus,
    find_metric,
    finished_snapshot,
    live_snapshot,
    read_states,
)
from mlbench_cli.store import Store
from mlbench_cli.times import parse_timestamp, timestamp

if TYPE_CHECKING:
    from mlbench_cli.engines.base import Engine

MAX_SHOWN = 50  # runs, unless --limit says otherwise
STATES = (*RunState, ENDED, UNKNOWN, *Outcome)


@dataclass(frozen=True)
class Choice:
    """Which runs are shown: the newest `limit` (0: all) that match. `since` is in seconds since 1970."""

    limit: int = MAX_SHOWN
    state: str | None = None
    task: str | None = None
    since: float | None = None

    @property
    def is_filter(self) -> bool:
        return not (self.state is None and self.task is None and self.since is None)

    def select(self, newest_first: Iterable[RunRow], engine_of: "Callable[[Run], Engine]") -> list[RunStatus]:
        """The states of the runs that match, oldest first."""
        begin = float("-inf") if self.since is None else self.since
        recent = takewhile(lambda row: parse_timestamp(row.run.created) >= begin, newest_first)
        rows = (row for row in recent if self.task in (None, row.run.spec.task))
        states = (
            status for status in read_states(rows, engine_of) if self.state in (None, status.state, status.outcome)
        )
        return list(islice(states, self.limit or None))[::-1]


def status(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="show this run with its workers, this experiment with its runs, or several of them",
            autocompletion=complete_names,
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option("--metric", "-m", help="show this metric, e.g. Prec@1 or loss")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="follow the run; Ctrl-C only ends this")] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="show this cluster, even if it was removed", autocompletion=complete_clusters),
    ] = None,
    cloud: Annotated[bool, typer.Option("--cloud", help="with --cluster: ask the cloud what is there now")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show the evidence behind each finding")] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="show the newest N runs that match; 0: all")
    ] = MAX_SHOWN,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="only runs in this state or with this outcome, e.g. running, failed",
            autocompletion=lambda incomplete: [word for word in STATES if word.startswith(incomplete)],
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="only runs of this task", autocompletion=complete_tasks)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="only runs created since then, e.g. 2d, or 2026-01-31T10:00:00Z"),
    ] = None,
    output: Output = Format.text,
) -> None:
    """Show the newest runs, or one with its workers, metrics and findings; or a cluster with its resources."""
    choice = Choice(limit, state, task, None if since is None else parse_since(since))
    if state is not None and state not in STATES:
        raise UsageError(
            f'There is no state "{state[:60]}".{did_you_mean(state, STATES)}', hint=f"One of {', '.join(STATES)}"
        )
    if choice.is_filter and cluster is not None:
        raise UsageError("--state, --task and --since choose among runs.", hint="mlbench status --state running")
    store = Store()
    if cluster is not None:
        from mlbench_cli.commands._cluster_status import show_cluster

        if names or metric is not None or watch:
            raise UsageError("--cluster shows a cluster; NAME, --metric and --watch are about a run.")
        show_cluster(store, cluster, output, cloud=cloud)
        return
    if cloud:
        raise UsageError("--cloud is about a cluster.", hint="mlbench status --cluster NAME --cloud")
    if not names:
        if metric is not None or watch:
            raise UsageError("--metric and --watch are about one run.", hint="mlbench status NAME --watch")
        _show_all(store, choice, output)
        return
    chosen = select(store, names, readable=False)
    is_one_run = len(chosen.rows) == 1 and not choice.is_filter
    if is_one_run and (names == chosen.names or watch or metric is not None):
        (row,) = select(store, chosen.names).rows
        _show_run(row, store, metric, watch, verbose, output)
        return
    if metric is not None or watch:
        raise UsageError(
            f"--metric and --watch are about one run; these are {len(chosen.rows)}.",
            hint=f"mlbench status {chosen.names[0]} --watch" if chosen.rows else "mlbench status",
        )
    _show_named(chosen, store, choice, verbose, output)


def _show_run(row: RunRow, store: Store, metric: str | None, watch: bool, verbose: bool, output: Format) -> None:
    document = finished_snapshot(row) or _snapshot(row, store, watch)
    if metric is not None:
        document["metric"] = {"name": metric, "value": find_metric(document["metrics"], metric)}
    if output == Format.json:
        console.out_json(document)
    else:
        _show_one(row.run, document, metric, verbose)


def _show_named(chosen: Selection, store: Store, choice: Choice, verbose: bool, output: Format) -> None:
    """Experiments and runs that were named: each experiment in a few lines, then the table of all runs."""
    engines = _engines(store)
    newest_first = sorted(chosen.rows, key=lambda row: row.run.created, reverse=True)
    states = choice.select(newest_first, engines) if choice.is_filter else list(read_states(chosen.rows, engines))
    experiments = [] if choice.is_filter else chosen.experiments
    known = [experiment_status(item, states, store, engines) for item in experiments]
    if output == Format.text:
        for item in known:
            show_experiment(item, verbose)
        if not states:
            console.note("No run matches.\nNext: mlbench status")
            return
    _show_rows(states, output, known)


def _snapshot(row: RunRow, store: Store, watch: bool) -> dict[str, Any]:
    """State of a run whose archive is not complete. Reads only: whoever waits for the run completes it."""
    from mlbench_cli.runs import supervise

    engine = engine_of_run(row.run, store)
    if watch:
        with Reporter(row.run) as report:
            supervise.watch(row.run, engine, report)
    if (document := finished_snapshot(row)) is None:
        document = live_snapshot(row, engine)
        document["kept_until"] = _kept_until(row.run, engine) if document["state"] == ENDED else None
    document["ranks"] = [_with_timestamps(rank) for rank in document["ranks"]]
    return document


def _kept_until(run: Run, engine: "Engine") -> str | None:
    """Until when the cluster keeps the results, RFC 3339; None if it does not, or does not say."""
    try:
        until = engine.kept_until(run)
    except MlbenchError:
        return None
    return None if until is None else timestamp(until)


def _with_timestamps(rank: dict[str, Any]) -> dict[str, Any]:
    """A worker's times as RFC 3339, as in an archive."""
    moments = {key: rank[key] for key in ("started", "finished") if isinstance(rank.get(key), int | float)}
    return {**rank, **{key: timestamp(moment) for key, moment in moments.items()}}


def _engines(store: Store) -> "Callable[[Run], Engine]":
    """The engine of a run's cluster, made once for each cluster."""
    engines: dict[str, Engine] = {}

    def find(run: Run) -> "Engine":
        if run.spec.cluster not in engines:
            engines[run.spec.cluster] = engine_of_run(run, store)
        return engines[run.spec.cluster]

    return find


def _show_all(store: Store, choice: Choice, output: Format) -> None:
    states = choice.select(store.iterate_runs(), _engines(store))
    if not states and choice.is_filter and output == Format.text:
        console.note("No run matches.\nNext: mlbench status")
        return
    _show_rows(states, output)
    hidden = store.count_runs() - len(states)
    if hidden and not choice.is_filter and output == Format.text:
        console.note(f"{hidden} older runs are not shown: --limit 0 shows all.")


def _show_rows(states: list[RunStatus], output: Format, experiments: Sequence[ExperimentStatus] = ()) -> None:
    repeats = repeats_in(status.row for status in states)
    if output == Format.json:
        runs = [{**status.to_dict(), **_figures(status.row.run)} for status in states]
        document = {"runs": runs, "repeats": [found.to_dict() for found in repeats]}
        known = {"experiments": [item.to_dict() for item in experiments]} if experiments else {}
        console.out_json({**document, **known})
        return
    if not states:
        console.note("There are no runs yet.\nNext: mlbench tasks, then mlbench run NAME 1 2 --task TASK")
        return
    console.out_table(
        ["RUN", "WORKERS", "STATE", "OUTCOME", "GOAL", "SECONDS", "TASK", "BACKEND", "CLUSTER", "CREATED"],
        [_cells(status) for status in states],
        droppable=["BACKEND", "CLUSTER", "CREATED", "TASK", "GOAL", "SECONDS"],
    )
    show_repeats(repeats)
    for status in states:
        if status.problem and not (experiments and is_queue_problem(status)):
            console.warn(f"{status.row.run.name}: {status.problem}")
    ended = [status.row.run.name for status in states if status.state == ENDED]
    if ended:
        console.note(f"Ended, archive not complete yet: {', '.join(ended)}. Next: mlbench wait {ended[0]}")


def _cells(status: RunStatus) -> list[object]:
    run, spec = status.row.run, status.row.run.spec
    figures = _figures(run)
    return [
        run.name,
        spec.workers,
        status.state,
        status.outcome,
        _goal_cell(figures["goal"]),
        None if figures["seconds"] is None else round(figures["seconds"], 2),
        spec.task,
        spec.backend,
        spec.cluster,
        console.ago(run.created),
    ]


def _figures(run: Run) -> dict[str, Any]:
    """`goal` of result.json and `seconds` that the task took (wall clock); None if the run has no results."""
    finished = read_finished(run)
    result = finished.result if finished else None
    if result is None:
        return {"goal": None, "seconds": None}
    seconds = result.get("task_seconds")
    return {"goal": result.get("goal"), "seconds": seconds.get("wall") if seconds else None}


def _goal_cell(goal: dict[str, Any] | None) -> str | None:
    if goal is None:
        return None
    value = "-" if goal.get("value") is None else f"{goal['value']:.4g}"
    return f"{goal['metric']} {value} ({goal['comparison']} {goal['threshold']:g})"


def _show_one(run: Run, document: dict[str, Any], metric: str | None, verbose: bool) -> None:
    facts: list[tuple[str, str | None]] = [
        ("Run", f"{run.name}: {in_words(run.spec)}"),
        ("State", document["state"] + (f", {document['outcome']}" if document["outcome"] else "")),
        ("Result", document.get("summary")),
        ("Progress", _progress(document["progress"])),
        ("Goal", _goal(document["goal"])),
        ("Label", _label(document["functional_only"])),
        ("Kept", f"on the cluster until {document['kept_until']}" if document.get("kept_until") else None),
        ("Folder", document["folder"]),
    ]
    console.out("\n".join(f"{title + ':':<10}{console.clean(text)}" for title, text in facts if text))
    _show_metrics(document, metric)
    console.out("")
    console.out_table(
        ["RANK", "PHASE", "EXIT", "NODE", "REASON"],
        [
            [worker["rank"], worker["phase"], worker["exit_code"], worker["node"], worker["reason"]]
            for worker in document["ranks"]
        ],
        droppable=["NODE"],
        wrap=True,
    )
    for finding in document["findings"]:
        console.out(
            f"\n{console.clean(finding['summary'])}" + (f"\nNext: {finding['hint']}" if finding["hint"] else "")
        )
        if verbose:
            _show_evidence(finding)
    if document["findings"] and not verbose:
        console.note(f"\nEvidence: mlbench status {run.name} --verbose")


def _show_evidence(finding: dict[str, Any]) -> None:
    """The finding's code and its evidence, one fact a line; texts of several lines are indented below their name."""
    nature = [word for word in ("retryable", "permanent") if finding[word]]
    console.out(f"  {', '.join([finding['code'], *nature])}")
    for name, value in finding["evidence"].items():
        listed = isinstance(value, list) and all(isinstance(item, str) for item in value)
        lines = value if listed else value.splitlines() if isinstance(value, str) else [json.dumps(value, default=str)]
        if len(lines) == 1 and not listed:
            console.out(f"  {name}: {console.clean(lines[0])}")
        else:
            console.out("\n".join((f"  {name}:", *(f"    {console.clean(line)}" for line in lines))))


def _label(functional_only: str | None) -> str | None:
    return f"functional, not a performance measurement: {functional_only}" if functional_only else None


def _show_metrics(document: dict[str, Any], metric: str | None) -> None:
    metrics = document["metrics"]
    if metric is None:
        shown = metrics
    else:
        value = find_metric(metrics, metric)
        if value is None:
            known = f" It has reported: {', '.join(map(console.clean, metrics))}." if metrics else ""
            console.note(f"No {metric} has been reported yet.{known}")
            return
        shown = {metric: value}
    if shown:
        console.out("")
        console.out_table(["METRIC", "LAST VALUE"], list(shown.items()))


def _progress(progress: dict[str, Any]) -> str | None:
    if progress["phase"] is None:
        return None
    text = str(progress["phase"])
    if progress["epoch"] is not None:
        text += f", epoch {progress['epoch']:g}" + (f" of {progress['epochs']:g}" if progress["epochs"] else "")
    text += f", elapsed {console.duration(progress['elapsed'])}"
    left = format_eta(progress["eta"], progress.get("eta_high"))
    return text if left is None else f"{text}, {left}"


def _goal(goal: dict[str, Any] | None) -> str | None:
    if goal is None:
        return None
    reached = "-" if goal["best"] is None else f"{goal['best']:.4g}"
    return f"{goal['metric']} {goal['comparison']} {goal['threshold']:g}, best so far {reached}"
