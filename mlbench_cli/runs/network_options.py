"""Resolve --network, and reject runs whose ranks would bypass a shaped network."""

import sys

from mlbench_cli.errors import UsageError
from mlbench_cli.model.network import MODEL, is_modeled, parse_network
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.request import Request
from mlbench_cli.util.text import shorten

NETWORKED_BACKENDS = ("gloo", "grpc")  # that use the network even between ranks on one machine


def resolve_network(request: Request, asked: str) -> str:
    """The canonical text of the network that was asked for."""
    shape = parse_network(asked)
    if shape.is_modeled and (request.task is None or request.command is not None):
        raise UsageError(
            f"--network {shorten(asked)}: modeled networks delay the gradients of tasks, not of your own command.",
            hint=f"--network {str(shape).removeprefix(MODEL)} emulates a real one.",
        )
    return str(shape)


def check_network(spec: RunSpec, network: str) -> None:
    """Refuse a shaped network for a run whose ranks would not use it."""
    if spec.engine != "local":
        raise UsageError(
            "--network emulates a network between processes of this machine only. Machines of a cluster are joined by "
            "a network that mlbench does not control.",
            hint="Leave out --network, or --cluster local.",
        )
    if is_modeled(network):
        return
    if sys.platform != "linux":
        raise UsageError("--network needs Linux network namespaces.", hint="Leave out --network.")
    if spec.backend not in NETWORKED_BACKENDS and not (spec.device == "gpu" and spec.backend == "nccl"):
        raise UsageError(
            f"--network: ranks on the backend {spec.backend} may communicate through shared memory instead.",
            hint=f"Choose --backend {NETWORKED_BACKENDS[0]}.",
        )
