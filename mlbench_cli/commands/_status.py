"""What `mlbench status` shows of runs, without Typer, whose import takes a third of the time of this command."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

from mlbench_cli import console
from mlbench_cli.api import Client, RunHandle
from mlbench_cli.api.client import Chosen
from mlbench_cli.commands._repeats import show_repeats
from mlbench_cli.commands._report import Reporter, run_in_words
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.model.methods import OWN
from mlbench_cli.model.run import DAMAGED, ExperimentState, FindingDocument, JsonObject
from mlbench_cli.results.analysis.numbers import SECONDS, format_goal, format_percent, format_value, unit_of
from mlbench_cli.runs.experiment_status import ExperimentStatus
from mlbench_cli.runs.progress import format_eta
from mlbench_cli.runs.repeats import repeats_in
from mlbench_cli.runs.snapshot import ENDED, UNKNOWN, GoalStanding, RunStatus, find_metric, group_conditions
from mlbench_cli.runs.views import add_figures, runs_document
from mlbench_cli.util.text import counted, list_some
from mlbench_cli.util.times import parse_timestamp

MAX_SHOWN = 50  # runs, unless --limit says otherwise


class Choice(NamedTuple):
    """Which runs are shown: the newest `limit` (0: all) that match. `since` is in seconds since 1970."""

    limit: int = MAX_SHOWN
    state: str | None = None
    task: str | None = None
    since: float | None = None

    @property
    def is_filter(self) -> bool:
        """Whether it leaves out runs for other reasons than `limit`."""
        return not (self.state is None and self.task is None and self.since is None)

    def select(self, newest_first: Iterable[RunHandle], client: Client) -> list[RunStatus]:
        """The states of the runs that match, oldest first."""
        begin = float("-inf") if self.since is None else self.since
        recent = takewhile(lambda run: parse_timestamp(run.run.created) >= begin, newest_first)
        runs = (run for run in recent if self.task in (None, run.run.spec.task))
        states = filter(self._matches, client.read_states(runs))
        return list(islice(states, self.limit or None))[::-1]

    def _matches(self, status: RunStatus) -> bool:
        """Whether the run has the state or outcome that was asked for; damage shows only where the archive is read."""
        if self.state is None:
            return True
        if self.state != DAMAGED and self.state not in (status.state, status.outcome):
            return False
        return (add_figures(status)[0].state == DAMAGED) == (self.state == DAMAGED)


def show_runs(
    client: Client,
    names: list[str] | None,
    choice: Choice,
    *,
    metric: str | None = None,
    watch: bool = False,
    verbose: bool = False,
    output: Format = Format.text,
) -> None:
    """The newest runs that match, or those that are named. Raises UsageError for options that need one run."""
    if not names:
        if metric is not None or watch:
            raise UsageError("--metric and --watch need one run.", hint="mlbench status NAME --watch")
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
            f"--metric and --watch need one run, not {len(chosen.runs)}.",
            hint=f"mlbench status {chosen.names[0]} --watch" if chosen.runs else "mlbench status",
        )
    _show_named(chosen, client, choice, verbose, output)


def _show_run(run: RunHandle, metric: str | None, watch: bool, verbose: bool, output: Format) -> None:
    if watch and not run.is_finished:
        with Reporter(run) as report:
            run.watch(report)
    document = run.status()
    if metric is not None:
        name = find_metric(document["metrics"], metric)
        document["metric"] = {"name": metric, "value": None if name is None else document["metrics"][name]}
    if output == Format.json:
        console.out_json(document)
    else:
        show_one(document, metric, verbose)


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
    _show_rows(client, states, output, known)


def _show_all(client: Client, choice: Choice, output: Format) -> None:
    tasks = () if choice.task is None else (choice.task,)
    # A run of any recorded state is unknown if its spec cannot be read, and damaged if its archive is.
    shown_as = None if choice.state in (UNKNOWN, DAMAGED) else choice.state
    states = choice.select(client.iterate_runs(tasks=tasks, shown_as=shown_as), client)
    if not states and choice.is_filter and output == Format.text:
        console.note("No run matches.\nNext: mlbench status")
        return
    _show_rows(client, states, output)
    hidden = client.count_runs() - len(states)
    if hidden and not choice.is_filter and output == Format.text:
        console.note(f"{hidden} older runs are hidden; --limit 0 shows all.")


def _show_rows(
    client: Client, states: list[RunStatus], output: Format, experiments: Sequence[ExperimentStatus] = ()
) -> None:
    if output == Format.json:
        console.out_json(runs_document(client.store, states, experiments))
        return
    repeats = repeats_in(client.store, (status.row for status in states))
    shown = [add_figures(status) for status in states]
    if not states:
        _explain_empty_store(client)
        return
    show_rows([{**status.to_dict(), **figures} for status, figures in shown])
    show_repeats(repeats, all_metrics=True)
    never_started: dict[str, list[str]] = {}  # experiment -> runs that nobody starts
    for status, _ in shown:
        if status.problem and status.row.queue is not None:
            never_started.setdefault(status.row.queue.name, []).append(status.row.run.name)
        elif status.problem:
            console.warn(f"{status.row.run.name}: {status.problem}")
    for experiment, names in never_started.items() if not experiments else ():  # whose lines say it already
        console.warn(f"{list_some(names)}: not started, because the queue of the experiment has ended.")
        console.next_step(f"mlbench run {experiment}")
    ended = [status.row.run.name for status in states if status.state == ENDED]
    if ended:
        console.note(f"Ended, archive not complete yet: {', '.join(ended)}.")
        console.next_step(f"mlbench wait {ended[0]}")


def _explain_empty_store(client: Client) -> None:
    if folders := client.list_unknown_folders():
        console.note(
            f"The store has no runs, but {folders[0].parent} contains {counted(len(folders), 'sealed run folder')}.\n"
            "Next: mlbench status --refresh"
        )
        return
    console.note("No runs yet.")
    console.next_step("mlbench tasks", "mlbench run first 1 2 --task digits_resnet --light")


def show_rows(runs: Sequence[JsonObject]) -> None:
    """The table of runs, each as `status -o json` describes it. Columns in which no run says anything are left out."""
    columns: dict[str, list[object]] = {
        "RUN": [run["name"] for run in runs],
        "WORKERS": [run["workers"] for run in runs],
        "STATE": [run["state"] for run in runs],
        "OUTCOME": [run["outcome"] for run in runs],
        "GOAL": [format_goal(run.get("goal"), run["outcome"]) for run in runs],
        "TIME": [None if run.get("seconds") is None else format_value(run["seconds"], SECONDS) for run in runs],
    }
    special: dict[str, list[object]] = {
        "METHOD": [run["method"] for run in runs],
        "NETWORK": [run["network"] for run in runs],
        "LABEL": ["functional" if run["functional_only"] else None for run in runs],
        "CONDITIONS": [", ".join(group_conditions(run.get("conditions"))) or None for run in runs],
    }
    columns |= {name: cells for name, cells in special.items() if set(cells) - {None, "", OWN}}
    columns |= {
        "TASK": [run["title"] for run in runs],
        "BACKEND": [run["backend"] for run in runs],
        "CLUSTER": [run["cluster"] for run in runs],
        "CREATED": [console.ago(run["created"]) for run in runs],
    }
    droppable = ["BACKEND", "CLUSTER", "CREATED", "TASK", "GOAL", "LABEL", "CONDITIONS", "NETWORK", "TIME"]
    rows = list(zip(*columns.values(), strict=True))
    console.out_table(list(columns), rows, droppable=[name for name in droppable if name in columns])


def show_one(document: dict[str, Any], metric: str | None, verbose: bool) -> None:
    """A run in detail, as `status NAME -o json` describes it."""
    facts: list[tuple[str, str | None]] = [
        ("Run", f"{document['name']}: {run_in_words(document)}"),
        ("State", document["state"] + (f", {document['outcome']}" if document["outcome"] else "")),
        ("Result", document.get("summary")),
        ("Progress", _progress(document["progress"])),
        ("Goal", _goal(document["goal"], document["outcome"] == "budget_spent")),
        ("Label", _label(document["functional_only"])),
        ("Method", ", ".join(filter(None, (document["method"], "pinned to CPUs" if document["pin"] else "")))),
        ("Network", document.get("measured_network") or document["network"]),
        *(("Condition", phrase) for phrase in document.get("conditions") or ()),
        ("Goodput", _goodput(document.get("faults"))),
        ("Kept", f"on the cluster until {document['kept_until']}" if document.get("kept_until") else None),
        ("Folder", document["folder"]),
    ]
    console.out("\n".join(f"{title + ':':<11}{console.clean(text)}" for title, text in facts if text))
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
        console.note(f"\nEvidence: mlbench status {document['name']} --verbose")


def _goodput(faults: Mapping[str, Any] | None) -> str | None:
    """ "82 % of 61.2 s, 2 faults, 1 restart"; None for a run without faults and restart policy."""
    if not faults or faults["goodput"] is None:
        return None
    words = [f"{format_percent(faults['goodput'])} of {format_value(faults['wall_seconds'], SECONDS)}"]
    words += [counted(faults["injected"], "fault"), counted(faults["attempts"] - 1, "restart")]
    return ", ".join(words)


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


def _show_metrics(document: dict[str, Any], metric: str | None) -> None:
    metrics, figures = document["metrics"], document["metric_figures"]
    if metric is None:
        shown = {name: name for name in figures or metrics}
    else:
        name = find_metric(metrics, metric)
        if name is None:
            known = f" Reported so far: {', '.join(map(console.clean, metrics))}." if metrics else ""
            console.note(f"No {console.clean(metric)} has been reported yet.{known}")
            return
        shown = {metric: name}
    if shown:
        console.out("")
        rows = []
        for title, reported in shown.items():
            each = figures.get(reported, {"last": metrics.get(reported)})
            unit = each.get("unit", unit_of(reported))
            rows.append([title, *(format_value(each.get(word), unit) for word in ("last", "best", "mean"))])
        console.out_table(["METRIC", "LAST", "BEST", "MEAN"], rows)


def _progress(progress: dict[str, Any]) -> str | None:
    if progress["phase"] is None:
        return None
    text = str(progress["phase"])
    if progress["epoch"] is not None:
        text += f", epoch {progress['epoch']:g}" + (f" of {progress['epochs']:g}" if progress["epochs"] else "")
    text += f", elapsed {console.duration(progress['elapsed'])}"
    left = format_eta(progress["eta"], progress.get("eta_high"))
    return text if left is None else f"{text}, {left}"


def _goal(goal: GoalStanding | None, is_spent: bool) -> str | None:
    if goal is None:
        return None
    unit = unit_of(goal["metric"])
    reached = format_value(goal["best"], unit)
    at_end = f", {format_value(goal['value'], unit)} at the end" if is_spent else ""
    return f"{goal['metric']} {goal['comparison']} {goal['threshold']:g}, best {reached}{at_end}"


# --- experiments ------------------------------------------------------------------------------------------------------


def show_experiment(status: ExperimentStatus, verbose: bool) -> None:
    """A few lines on stdout; with `verbose` also the end of the queue's log."""
    counts = f"{status.finished} of {status.total} runs finished"
    counts += f", {status.failed} failed" if status.failed else ""
    counts += f", {status.canceled} canceled" if status.canceled else ""
    left = "" if status.eta is None else f", about {console.duration(status.eta)} left"
    facts = [("Experiment", status.name), ("State", f"{status.state}, {counts}{left}"), ("Queue", status.queue_text)]
    if status.experiment.require_goal:
        facts.append(("Goal", "required of every run"))
    console.out("\n".join(f"{title + ':':<12}{console.clean(text)}" for title, text in facts if text))
    if verbose and status.log:
        console.out("\n".join(f"  | {console.clean(line)}" for line in status.log), raw=True)
    console.out("")
    if status.state is ExperimentState.STOPPED:
        console.next_step(f"mlbench run {status.name}")
