"""The public Python API: what the commands do, as objects.

    from mlbench_cli.api import Client, open_archive

    client = Client()
    experiment = client.run("demo", [1, 2], task="digits_resnet", preset="tiny")
    for run in experiment.runs():
        run.wait()
        table = run.metrics(["val_global_Prec@1"])
        print(run.name, run.outcome, table[-1].value)

Names without an underscore in `__all__` follow semantic versioning. Errors are those of `mlbench_cli.errors`, whose
tree is the table of exit codes. Nothing is printed. `to_pandas`, `to_polars` and `to_arrow` need these libraries;
without them everything is an object of plain values. A client may be used by one thread; make one per thread.
"""

from mlbench_cli.api.archives import (
    check_archive,
    compare,
    judge,
    judge_reproduction,
    metrics_of,
    open_archive,
    report,
    resources_of,
    series,
)
from mlbench_cli.api.client import Chosen, Client
from mlbench_cli.api.experiments import ExperimentHandle
from mlbench_cli.api.launches import Launch, OpenExperiment
from mlbench_cli.api.repetition import AuthorsProgram
from mlbench_cli.api.runs import RunHandle
from mlbench_cli.engines.base import Submission
from mlbench_cli.results.analysis.tables import MetricPoint, MetricTable, ResourceTable
from mlbench_cli.runs.finalize import FinishedRun

__all__ = [
    "AuthorsProgram",
    "Chosen",
    "Client",
    "ExperimentHandle",
    "FinishedRun",
    "Launch",
    "MetricPoint",
    "MetricTable",
    "OpenExperiment",
    "ResourceTable",
    "RunHandle",
    "Submission",
    "check_archive",
    "compare",
    "judge",
    "judge_reproduction",
    "metrics_of",
    "open_archive",
    "report",
    "resources_of",
    "series",
]
