"""`mlbench status`: what the runs do."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.api import Client
from mlbench_cli.commands._cluster_status import show_cluster
from mlbench_cli.commands._common import Format, Output, complete_clusters, complete_tasks, one_of, print_answer
from mlbench_cli.commands._selection import NewerThan, complete_names
from mlbench_cli.commands._status import MAX_SHOWN, Choice, show_runs
from mlbench_cli.errors import MlbenchError, UsageError, did_you_mean
from mlbench_cli.model.run import DAMAGED, Outcome, RunState
from mlbench_cli.runs.snapshot import ENDED, UNKNOWN
from mlbench_cli.util.durations import parse_since

STATES = (*RunState, ENDED, UNKNOWN, DAMAGED, *Outcome)


def status(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="run, experiment or cluster to show in detail",
            autocompletion=complete_names,
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option("--metric", "-m", help="show this metric, e.g. Prec@1 or loss")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="watch the run; Ctrl-C stops the watching, not the run")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="show this cluster, even a deleted one", autocompletion=complete_clusters),
    ] = None,
    cloud: Annotated[bool, typer.Option("--cloud", help="with --cluster: also query the cloud")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show the evidence behind each finding")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="show where the threads of each rank are, while the run runs")
    ] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="first look for runs that other machines started on the known clusters")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=0, help="show the newest N runs that match; 0: all")
    ] = MAX_SHOWN,
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="only runs with this state or outcome, e.g. running or failed",
            autocompletion=one_of(*STATES),
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="only runs of this task", autocompletion=complete_tasks)
    ] = None,
    since: NewerThan = None,
    output: Output = Format.text,
) -> None:
    """Show the newest runs, or a run, experiment or cluster in detail."""
    choice = Choice(limit, state, task, None if since is None else parse_since(since))
    if state is not None and state not in STATES:
        raise UsageError(
            f'There is no state "{state[:60]}".{did_you_mean(state, STATES)}', hint=f"One of {', '.join(STATES)}"
        )
    if choice.is_filter and cluster is not None:
        raise UsageError(
            "--state, --task and --since select runs and cannot be combined with NAME.",
            hint="mlbench status --state running",
        )
    client = Client(notice=console.note)
    if refresh:
        _find_others_runs(client)
    if cluster is not None:
        if names or metric is not None or watch:
            raise UsageError("--cluster cannot be combined with NAME, --metric or --watch, which are about runs.")
        show_cluster(client.store, cluster, output, cloud=cloud)
        return
    if stacks:
        _show_stacks(client, names or [], output)
        return
    if cloud:
        raise UsageError("--cloud requires --cluster.", hint="mlbench status --cluster NAME --cloud")
    show_runs(client, names, choice, metric=metric, watch=watch, verbose=verbose, output=output)


def _find_others_runs(client: Client) -> None:
    """Record the runs that are on the clusters, or in folders, and not in the store."""
    for cluster in client.store.clusters():
        try:
            found = client.discover(cluster.name)
        except MlbenchError as error:
            console.warn(f"{cluster.name}: {error.message}")
            continue
        for run in found:
            if run.problem:
                console.warn(f"{run.name}: {run.problem}")


def _show_stacks(client: Client, names: list[str], output: Format) -> None:
    """Print the stacks of the ranks of one run."""
    if len(names) != 1:
        raise UsageError("--stacks needs the name of one run.", hint="mlbench status RUN --stacks")
    found = client.find_run(names[0]).stacks()
    text = "\n".join(f"Rank {rank}:\n{console.clean(text, keep=chr(10))}" for rank, text in sorted(found.items()))
    print_answer(output, {"name": names[0], "stacks": {str(rank): text for rank, text in found.items()}}, text)
