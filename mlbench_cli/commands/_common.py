"""What several commands share: options, and the engine of a cluster."""

from enum import StrEnum
from typing import Annotated

import typer

from mlbench_cli.engines.base import Engine
from mlbench_cli.store import Cluster


class Format(StrEnum):
    text = "text"
    json = "json"


Output = Annotated[Format, typer.Option("--output", "-o", help="text, or one JSON document")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="ask nothing")]
RunName = Annotated[str, typer.Argument(metavar="NAME", help="name of the run, as mlbench status shows it")]


def engine_of(cluster: Cluster) -> Engine:
    """The engine that executes runs on `cluster`."""
    if cluster.provider == "local":
        from mlbench_cli.engines.local import LocalEngine

        return LocalEngine()
    from providers import registry

    return registry.engine(cluster)
