"""`mlbench status`: what the runs do."""

import json
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Annotated, Any, NamedTuple

import typer

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.api.client import Chosen
from mlbench_cli.commands._common import Format, Output, complete_clusters, complete_tasks
from mlbench_cli.commands._experiments import is_queue_problem, show_experiment
from mlbench_cli.commands._repeats import show_repeats
from mlbench_cli.commands._report import Reporter, format_eta, in_words
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.durations import parse_since
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model import FindingDocument, Outcome, RunState
from mlbench_cli.network import network_phrase
from mlbench_cli.runs.experiment_status import ExperimentStatus
from mlbench_cli.runs.repeats import repeats_in
from mlbench_cli.runs.snapshot import ENDED, UNKNOWN, GoalStanding, RunStatus, find_metric
from mlbench_cli.runs.views import runs_document, summary_figures
from mlbench_cli.times import parse_timestamp

MAX_SHOWN = 50  # runs, unless --limit says otherwise
STATES = (*RunState, ENDED, UNKNOWN, *Outcome)


class Choice(NamedTuple):
    """Which runs are shown: the newest `limit` (0: all) that match. `since` is in seconds since 1970."""

    limit: int = MAX_SHOWN
    state: str | None = None
    task: str | None = None
    since: float | None = None

    @property
    def is_filter(self) -> bool:
        """Whether it leaves out runs for another reason than their number."""
        return not (self.state is None and self.task is None and self.since is None)

    def select(self, newest_first: Iterable[RunHandle], client: Client) -> list[RunStatus]:
        """The states of the runs that match, oldest first."""
        begin = float("-inf") if self.since is None else self.since
        recent = takewhile(lambda run: parse_timestamp(run.run.created) >= begin, newest_first)
        runs = (run for run in recent if self.task in (None, run.run.spec.task))
        states = (status for status in client.read_states(runs) if self.state in (None, status.state, status.outcome))
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
    client = Client(notice=console.note)
    if cluster is not None:
        from mlbench_cli.commands._cluster_status import show_cluster

        if names or metric is not None or watch:
            raise UsageError("--cluster shows a cluster; NAME, --metric and --watch are about a run.")
        show_cluster(client.store, cluster, output, cloud=cloud)
        return
    if cloud:
        raise UsageError("--cloud is about a cluster.", hint="mlbench status --cluster NAME --cloud")
    if not names:
        if metric is not None or watch:
            raise UsageError("--metric and --watch are about one run.", hint="mlbench status NAME --watch")
        _show_all(client, choice, output)
        return
    chosen = client.select(names, readable=False)
    is_one_run = len(chosen.runs) == 1 and not choice.is_filter
    if is_one_run and (names == chosen.names or watch or metric is not None):
        (run,) = client.select(chosen.names).runs
        _show_run(run, metric, watch, verbose, output)
        return
    if metric is not None or watch:
        raise UsageError(
            f"--metric and --watch are about one run; these are {len(chosen.runs)}.",
            hint=f"mlbench status {chosen.names[0]} --watch" if chosen.runs else "mlbench status",
        )
    _show_named(chosen, client, choice, verbose, output)


def _show_run(run: RunHandle, metric: str | None, watch: bool, verbose: bool, output: Format) -> None:
    if watch and not run.is_finished:
        with Reporter(run) as report:
            run.watch(report)
    document = run.status()
    if metric is not None:
        document["metric"] = {"name": metric, "value": find_metric(document["metrics"], metric)}
    if output == Format.json:
        console.out_json(document)
    else:
        _show_one(run, document, metric, verbose)


def _show_named(chosen: Chosen, client: Client, choice: Choice, verbose: bool, output: Format) -> None:
    """Experiments and runs that were named: each experiment in a few lines, then the table of all runs."""
    newest_first = sorted(chosen.runs, key=lambda run: run.run.created, reverse=True)
    states = choice.select(newest_first, client) if choice.is_filter else list(client.read_states(chosen.runs))
    experiments = [] if choice.is_filter else chosen.experiments
    known = [experiment.read_status(states) for experiment in experiments]
    if output == Format.text:
        for item in known:
            show_experiment(item, verbose)
        if not states:
            console.note("No run matches.\nNext: mlbench status")
            return
    _show_rows(states, output, known)


def _show_all(client: Client, choice: Choice, output: Format) -> None:
    states = choice.select(client.iterate_runs(), client)
    if not states and choice.is_filter and output == Format.text:
        console.note("No run matches.\nNext: mlbench status")
        return
    _show_rows(states, output)
    hidden = client.count_runs() - len(states)
    if hidden and not choice.is_filter and output == Format.text:
        console.note(f"{hidden} older runs are not shown: --limit 0 shows all.")


def _show_rows(states: list[RunStatus], output: Format, experiments: Sequence[ExperimentStatus] = ()) -> None:
    if output == Format.json:
        console.out_json(runs_document(states, experiments))
        return
    repeats = repeats_in(status.row for status in states)
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
    figures = summary_figures(run)
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


def _goal_cell(goal: GoalStanding | None) -> str | None:
    if goal is None:
        return None
    value = "-" if goal.get("value") is None else f"{goal['value']:.4g}"
    return f"{goal['metric']} {value} ({goal['comparison']} {goal['threshold']:g})"


def _show_one(run: RunHandle, document: dict[str, Any], metric: str | None, verbose: bool) -> None:
    facts: list[tuple[str, str | None]] = [
        ("Run", f"{run.name}: {in_words(run.run.spec)}"),
        ("State", document["state"] + (f", {document['outcome']}" if document["outcome"] else "")),
        ("Result", document.get("summary")),
        ("Progress", _progress(document["progress"])),
        ("Goal", _goal(document["goal"])),
        ("Label", _label(document["functional_only"])),
        ("Network", _network(run)),
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


def _show_evidence(finding: FindingDocument) -> None:
    """The finding's code and its evidence, one fact a line; texts of several lines are indented below their name."""
    nature = [
        word for word, holds in (("retryable", finding["retryable"]), ("permanent", finding["permanent"])) if holds
    ]
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


def _network(run: RunHandle) -> str | None:
    """What the network between the ranks was, if it matters; of a run that is not over, what was asked for."""
    finished = run.finished
    network = finished.result.get("network") if finished and finished.result else None
    return network_phrase(network) if network else run.run.spec.network


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


def _goal(goal: GoalStanding | None) -> str | None:
    if goal is None:
        return None
    reached = "-" if goal["best"] is None else f"{goal['best']:.4g}"
    return f"{goal['metric']} {goal['comparison']} {goal['threshold']:g}, best so far {reached}"
