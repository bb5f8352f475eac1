"""`mlbench status`: what the runs do."""

import json
from typing import Annotated, Any

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, engine_of_run
from mlbench_cli.commands._repeats import repeats_in, runs_named, show_repeats
from mlbench_cli.commands._report import Reporter, in_words, to_go
from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.model import Run, RunRow
from mlbench_cli.runs.settled import snapshot_of_settled
from mlbench_cli.store import Store

PREFIXES = ("", "val_global_", "val_", "train_")  # under which tasks report a metric of that name


def status(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="show this run with its workers")] = None,
    metric: Annotated[str | None, typer.Option("--metric", "-m", help="show this metric, as Prec@1 or loss")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="follow the run; Ctrl-C only ends this")] = False,
    cluster: Annotated[str | None, typer.Option("--cluster", help="show this cluster, also a removed one")] = None,
    cloud: Annotated[bool, typer.Option("--cloud", help="with --cluster: ask the cloud what is there now")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="with each finding, what it was concluded from")
    ] = False,
    output: Output = Format.text,
) -> None:
    """Show all runs, or one with its workers, its metrics and what is in its way; or a cluster with its resources."""
    store = Store()
    if cluster is not None:
        from mlbench_cli.commands._cluster_status import show_cluster

        if name is not None or metric is not None or watch:
            raise UsageError("--cluster shows a cluster; NAME, --metric and --watch are about a run.")
        show_cluster(store, cluster, output, cloud=cloud)
        return
    if cloud:
        raise UsageError("--cloud is about a cluster.", hint="mlbench status --cluster NAME --cloud")
    if name is None:
        if metric is not None or watch:
            raise UsageError("--metric and --watch are about one run.", hint="mlbench status NAME --watch")
        _show_all(store, output)
        return
    runs = runs_named(store, name)
    if len(runs) > 1 or runs[0].name != name:
        _show_repeats(store, name, runs, metric, watch, output)
        return
    (run,) = runs
    if (document := snapshot_of_settled(store.run(name))) is None:
        document = _look(run, store, watch)
    if metric is not None:
        document["metric"] = {"name": metric, "value": _find(document["metrics"], metric)}
    if output == Format.json:
        console.out_json(document)
    else:
        _show_one(run, document, metric, verbose)


def _look(run: Run, store: Store, watch: bool) -> dict[str, Any]:
    """What a run does that is not over yet, or has not been seen to be."""
    from mlbench_cli.runs import supervise

    engine = engine_of_run(run, store)
    if watch:
        with Reporter(run) as report:
            supervise.follow(run, engine, store, report=report)
    else:
        supervise.settle(run, engine, store)
    return supervise.snapshot(store.run(run.name), engine)


def _show_repeats(store: Store, name: str, runs: list[Run], metric: str | None, watch: bool, output: Format) -> None:
    if metric is not None or watch:
        raise UsageError(
            f"--metric and --watch are about one run; {name} has {len(runs)} repeats.",
            hint=f"mlbench status {runs[0].name} --watch",
        )
    names = {run.name for run in runs}
    _show_rows([row for row in _settled(store) if row.run.name in names], output)


def _show_all(store: Store, output: Format) -> None:
    _show_rows(_settled(store), output)


def _show_rows(rows: list[RunRow], output: Format) -> None:
    if output == Format.json:
        repeats = [found.to_dict() for found in repeats_in(rows)]
        console.out_json({"runs": [_document(row) for row in rows], "repeats": repeats})
        return
    if not rows:
        console.note("There are no runs yet.\nNext: mlbench tasks, then mlbench run NAME 1 2 --task TASK")
        return
    console.out_table(
        ["RUN", "WORKERS", "STATE", "OUTCOME", "TASK", "BACKEND", "CLUSTER", "CREATED"],
        [
            [
                row.run.name,
                row.run.spec.workers,
                row.state,
                row.outcome,
                row.run.spec.task,
                row.run.spec.backend,
                row.run.spec.cluster,
                console.ago(row.run.created),
            ]
            for row in rows
        ],
        droppable=["BACKEND", "CREATED", "CLUSTER", "TASK"],
    )
    show_repeats(repeats_in(rows))


def _settled(store: Store) -> list[RunRow]:
    """All runs as they are now: what has ended meanwhile is settled first. A silent cluster is no obstacle."""
    open_runs = [row.run for row in store.runs() if row.state != "finished"]
    if not open_runs:
        return store.runs()
    from mlbench_cli.runs import supervise

    silent: set[str] = set()
    for run in open_runs:
        cluster = run.spec.cluster
        if cluster in silent:
            continue
        try:
            supervise.settle(run, engine_of_run(run, store), store)
        except MlbenchError as error:
            silent.add(cluster)
            console.warn(f"{cluster}: its runs are shown as they were last seen. {error.message}")
    return store.runs()


def _document(row: RunRow) -> dict[str, Any]:
    run, spec = row.run, row.run.spec
    return {
        "name": run.name,
        "id": run.id,
        "created": run.created,
        "state": row.state,
        "outcome": row.outcome,
        "task": spec.task,
        "preset": spec.preset,
        "backend": spec.backend,
        "device": spec.device,
        "workers": spec.workers,
        "seed": spec.seed,
        "world_size": spec.world_size,
        "cluster": spec.cluster,
        "folder": str(run.folder),
    }


def _show_one(run: Run, document: dict[str, Any], metric: str | None, verbose: bool) -> None:
    facts: list[tuple[str, str | None]] = [
        ("Run", f"{run.name}: {in_words(run.spec)}"),
        ("State", document["state"] + (f", {document['outcome']}" if document["outcome"] else "")),
        ("Result", document.get("summary")),
        ("Progress", _progress(document["progress"])),
        ("Goal", _goal(document["goal"])),
        ("Label", _label(document["functional_only"])),
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
        console.note(f"\nWhat this was concluded from: mlbench status {run.name} --verbose")


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
    return f"functional, no measure of performance: {functional_only}" if functional_only else None


def _show_metrics(document: dict[str, Any], metric: str | None) -> None:
    metrics = document["metrics"]
    if metric is None:
        shown = metrics
    else:
        value = _find(metrics, metric)
        if value is None:
            known = f" It has reported: {', '.join(map(console.clean, metrics))}." if metrics else ""
            console.note(f"No {metric} has been reported yet.{known}")
            return
        shown = {metric: value}
    if shown:
        console.out("")
        console.out_table(["METRIC", "LAST VALUE"], list(shown.items()))


def _find(metrics: dict[str, float], metric: str) -> float | None:
    """The last value of a metric by its plain name: "Prec@1" finds val_global_Prec@1, as the original's status did."""
    return next((metrics[prefix + metric] for prefix in PREFIXES if prefix + metric in metrics), None)


def _progress(progress: dict[str, Any]) -> str | None:
    if progress["phase"] is None:
        return None
    text = str(progress["phase"])
    if progress["epoch"] is not None:
        text += f", epoch {progress['epoch']:g}" + (f" of {progress['epochs']:g}" if progress["epochs"] else "")
    text += f", {console.duration(progress['elapsed'])}"
    left = to_go(progress["eta"], progress.get("eta_high"))
    return text if left is None else f"{text}, {left}"


def _goal(goal: dict[str, Any] | None) -> str | None:
    if goal is None:
        return None
    reached = "-" if goal["best"] is None else f"{goal['best']:.4g}"
    return f"{goal['metric']} {goal['comparison']} {goal['threshold']:g}, best so far {reached}"
