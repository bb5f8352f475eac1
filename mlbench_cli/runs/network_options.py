"""What --network means: which runs may have a shaped network, and which would bypass it."""

import sys
from dataclasses import replace

from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model.network import MODEL, NetworkMethod, is_modeled, parse_network
from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.runs.request import Request
from mlbench_cli.util.text import shorten

NETWORKED_BACKENDS = ("gloo", "grpc")  # whose ranks of one machine use the network between them


def resolve_network(request: Request) -> str | None:
    """The canonical text of the network that was asked for."""
    if request.network is None:
        return None
    shape = parse_network(request.network)
    if shape.is_modeled and (request.task is None or request.command is not None):
        raise UsageError(
            f"--network {shorten(request.network)}: modeled networks delay the gradients of tasks, "
            "not of your own command.",
            hint=f"--network {str(shape).removeprefix(MODEL)} emulates a real one.",
        )
    return str(shape)


def add_network_method(
    options: KubernetesOptions, request: Request, cluster: Cluster, network: str | None
) -> KubernetesOptions:
    """The options with who shapes the run's network, if it is on Kubernetes. Raises UsageError if nobody can."""
    if cluster.provider == "local":
        return options
    if cluster.provider in ("slurm", "hosts"):
        if network is not None:
            raise UsageError(
                "--network works on this machine and between pods, not between other machines.",
                hint="Every run of several workers measures its network: see network.json of its archive.",
            )
        return options
    return replace(options, network_method=_choose_method(request.network_method, cluster, network))


def _choose_method(asked: str | None, cluster: Cluster, network: str | None) -> str | None:
    if asked is not None and asked not in [*NetworkMethod]:
        near = did_you_mean(asked, [*NetworkMethod])
        raise UsageError(f'There is no --network-method "{shorten(asked)}", only {", ".join(NetworkMethod)}.{near}')
    if network is None:
        if asked is not None:
            raise UsageError(f"--network-method {asked} needs --network.", hint="For example --network 1gbit.")
        return None
    if is_modeled(network):
        raise UsageError(
            f"--network {network}: modeled networks are only for local runs, because the cluster's own network "
            "would come on top.",
            hint="Remove it, or run locally.",
        )
    if asked is None and cluster.provider != "kind":
        raise UsageError(
            f'--network: mlbench cannot shape the network between the nodes of "{cluster.name}" itself.',
            hint="--network-method annotation (rate only, by the network plugin) or chaos-mesh (if installed). "
            "Without --network, every run of several workers measures its network: see network.json of its archive.",
        )
    method = NetworkMethod(asked or NetworkMethod.NSENTER)
    if method is NetworkMethod.NSENTER and cluster.provider != "kind":
        raise UsageError(
            f"--network-method {method} needs a cluster whose nodes are containers on this machine.",
            hint=f"--network-method {NetworkMethod.ANNOTATION} or {NetworkMethod.CHAOS_MESH}",
        )
    if parse_network(network).delay and not method.shapes_delay:
        raise UsageError(
            f"--network {network}: pod annotations support a rate but no delay.",
            hint=f"--network {network.partition(',')[0]}, or --network-method {NetworkMethod.CHAOS_MESH}",
        )
    return str(method)


def check_network(spec: RunSpec) -> None:
    """Refuse a shaped network for a run whose ranks would not use it."""
    if spec.network is None or is_modeled(spec.network):
        return
    if spec.engine == "local" and sys.platform != "linux":
        raise UsageError("--network needs Linux network namespaces.", hint="Leave out --network.")
    is_gpu = spec.device == "gpu"
    if is_gpu and spec.engine != "local":
        raise UsageError("--network with GPUs works only on this machine.", hint="Leave out --network, or --cluster.")
    if spec.backend not in NETWORKED_BACKENDS and not (is_gpu and spec.backend == "nccl"):
        raise UsageError(
            f"--network: ranks on the backend {spec.backend} may communicate through shared memory instead.",
            hint=f"Choose --backend {NETWORKED_BACKENDS[0]}.",
        )
    if spec.engine == "kubernetes":
        _check_pods(spec)


def _check_pods(spec: RunSpec) -> None:
    """Refuse pods whose network cannot be shaped, or whose probe would say nothing of it."""
    options = spec.kubernetes
    if options.host_network:
        raise UsageError(
            "--network and --host-network exclude each other, because such pods use the node's network.",
            hint="Leave out --host-network.",
        )
    if not spec.run_on_all:
        raise UsageError(
            "--network needs a command that all workers run, because a second probe follows it on each of them.",
            hint="Add --run-on-all.",
        )
    if options.network_method == NetworkMethod.ANNOTATION and not options.spread:
        raise UsageError(
            "--network-method annotation needs one worker per node: plugins do not limit traffic within a node.",
            hint="Leave out --no-spread.",
        )
