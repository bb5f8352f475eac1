"""What --network means: which runs may have a network of their own, and which would pass it by."""

import sys

from mlbench_cli.errors import UsageError
from mlbench_cli.network import MODEL, is_modelled, parse_network
from mlbench_cli.runs.request import Request, clip
from mlbench_cli.spec import RunSpec

NETWORKED_BACKENDS = ("gloo", "grpc")  # whose ranks of one machine use the network between them


def resolve_network(request: Request) -> str | None:
    """The canonical text of the network that was asked for."""
    if request.network is None:
        return None
    shape = parse_network(request.network)
    if shape.is_modelled and (request.task is None or request.command is not None):
        raise UsageError(
            f"--network {clip(request.network)}: a formula's network is one of a task's gradients, not of a command's.",
            hint=f"--network {str(shape).removeprefix(MODEL)} makes a real one.",
        )
    return str(shape)


def check_network(spec: RunSpec) -> None:
    """Refuse a network of its own for a run whose ranks would not use it."""
    if spec.network is None or is_modelled(spec.network):
        return
    if sys.platform != "linux":
        raise UsageError("--network needs the network namespaces of Linux.", hint="Leave out --network.")
    if spec.device == "gpu":
        raise UsageError("--network is for runs on CPUs: GPUs of one machine pass the network by.")
    if spec.backend not in NETWORKED_BACKENDS:
        raise UsageError(
            f"--network: ranks on the backend {spec.backend} may talk through this machine's memory instead.",
            hint=f"Choose --backend {NETWORKED_BACKENDS[0]}.",
        )


def refuse_network(request: Request) -> None:
    """Refuse --network on clusters."""
    if request.network is not None:
        raise UsageError(
            "--network makes a network on this machine; what joins the nodes of a cluster is the cluster's.",
            hint="Every run of several workers measures its network: see network.json of its archive.",
        )
