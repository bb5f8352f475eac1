"""`mlbench extend NAME DURATION`: let a cluster live longer, in its tags and in the cloud's own timer."""

import time
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.commands._clusters import StepPrinter, cluster_document
from mlbench_cli.commands._common import Format, Output, complete_clusters, print_answer
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.runs.request import parse_duration
from mlbench_cli.storage.store import Store


def extend(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="cluster (list: mlbench list-clusters)", autocompletion=complete_clusters),
    ],
    duration: Annotated[str, typer.Argument(metavar="DURATION", help="time to add, e.g. 90m, 2h, 1d")],
    output: Output = Format.text,
) -> None:
    """Extend the lifetime of a cluster from its current end, or from now if that has passed.

    This updates the tag that mlbench gc reads on every machine, and the timer in the cloud.
    """
    seconds = parse_duration(duration, "DURATION")
    store = Store(notice=console.note)
    with StepPrinter() as report:
        ready = cluster_changes.extend_cluster(store, store.cluster(name), seconds, report)
    left = console.duration((ClusterDetails.of(ready).expires or 0) - time.time())
    print_answer(output, {"cluster": cluster_document(ready)}, f"The cluster {name} expires in {left}.")
