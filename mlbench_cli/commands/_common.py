"""What several commands share: options, and the engine of a run."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlbench_cli import console
from mlbench_cli.errors import UsageError
from mlbench_cli.model import Cluster, Run
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.store import Store

if TYPE_CHECKING:
    from mlbench_cli.engines.base import Engine


class Format(StrEnum):
    text = "text"
    json = "json"


Output = Annotated[Format, typer.Option("--output", "-o", help="text, or one JSON document")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="ask nothing")]
RequireGoal = Annotated[bool, typer.Option("--require-goal", help="exit with 7 where the goal is not reached")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="name of the run, as mlbench status shows it",
        autocompletion=lambda incomplete: [name for name in _run_names() if name.startswith(incomplete)],
    ),
]


def _run_names() -> list[str]:
    return [row.run.name for row in Store().runs()]


# --- engines --------------------------------------------------------------------------------------------------------


def engine_of(cluster: Cluster) -> "Engine":
    """The engine that executes runs on `cluster`."""
    if cluster.provider == "local":
        from mlbench_cli.engines.local.engine import LocalEngine

        return LocalEngine(finalizer="mlbench_cli.runs.finalize", report=console.note)
    from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
    from providers import registry

    return KubernetesEngine(registry.load(cluster.provider).connect(cluster))


def renderer_of(cluster: Cluster) -> "Engine":
    """An engine that renders for `cluster` and reaches nothing: --dry-run needs no network and no credentials."""
    if cluster.provider in ("local", "attached"):  # an attached one's access is read from a file
        return engine_of(cluster)
    from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
    from mlbench_cli.kube.access import Access

    return KubernetesEngine(Access("https://nowhere.invalid", cluster.details.get("namespace") or "default"))


def engine_of_run(run: Run, store: Store) -> "Engine":
    """The engine that executes `run`. For a sealed run any will do: all is in its folder, and no engine is asked."""
    return engine_of(Cluster("local", "local") if sealed(run) else store.cluster(run.spec.cluster))


def sealed(run: Run) -> bool:
    """Whether the run's folder is a complete archive."""
    return RunFolder(run.folder).is_sealed


def results_of(run: Run) -> Path:
    """The folder of a run's archive. Raises UsageError where it is not complete yet."""
    if not sealed(run):
        raise UsageError(f'The run "{run.name}" has no results yet.', hint=f"mlbench wait {run.name}")
    return run.folder
