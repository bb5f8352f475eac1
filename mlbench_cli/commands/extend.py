"""`mlbench extend NAME DURATION`: let a cluster live longer, in its tags and in the cloud's own timer."""

import time
from typing import Annotated

import typer

from mlbench_cli import cluster_changes, console
from mlbench_cli.cluster_details import ClusterDetails
from mlbench_cli.commands._clusters import StepPrinter, cluster_document
from mlbench_cli.commands._common import Format, Output, complete_clusters
from mlbench_cli.runs.request import parse_duration
from mlbench_cli.store import Store


def extend(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="a cluster of mlbench list-clusters", autocompletion=complete_clusters),
    ],
    duration: Annotated[str, typer.Argument(metavar="DURATION", help="how much longer it lives, e.g. 90m, 2h, 1d")],
    output: Output = Format.text,
) -> None:
    """Move the end of a cluster: from its present end, or from now if that has passed.

    The tag that `mlbench gc` of every machine reads moves, and so does the timer in the cloud.
    """
    seconds = parse_duration(duration, "DURATION")
    store = Store(notice=console.note)
    with StepPrinter() as report:
        ready = cluster_changes.extend_cluster(store, store.cluster(name), seconds, report)
    if output == Format.json:
        console.out_json({"cluster": cluster_document(ready)})
    else:
        end = ClusterDetails.of(ready).expires or 0
        console.out(f"The cluster {name} ends in {console.duration(end - time.time())}.")
