"""Shaping by this machine: the nodes are containers on it, and each pod's link is limited from its node."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypedDict

from mlbench_cli.engines.kubernetes.workers import Pod, main_status
from mlbench_cli.errors import CapacityError
from mlbench_cli.model.network import QUEUE_SECONDS, NetworkShape

# Node, script for its `sh -s`, arguments -> what it prints. Raises MlbenchError with the node's own words.
RunOnNode = Callable[[str, str, Sequence[str]], str]

PARALLEL_PODS = 8
MIN_QUEUE_BYTES = 1 << 18


class LinkDocument(TypedDict):
    """What was done to one pod's link; `pod` and `node` are the disciplines of its two ends, as tc shows them."""

    discipline: str
    kernel: str
    pod: str
    node: str


def shape_links(run_on_node: RunOnNode, pods: Mapping[int, Pod], shape: NetworkShape) -> list[LinkDocument]:
    """Limit the links of all pods, which must run. Raises CapacityError, or what `run_on_node` raises."""
    import templates

    script = (templates.FOLDER / "kubernetes" / "shape.sh").read_text("utf-8")

    def shape_one(pod: Pod) -> LinkDocument:
        node = str(pod["spec"]["nodeName"])
        text = run_on_node(node, script, [_find_container(pod), *link_arguments(shape)])
        try:
            document: LinkDocument = json.loads(text)
        except ValueError:
            raise CapacityError(f"the node {node} answered {text[:100]!r}") from None
        return document

    with ThreadPoolExecutor(PARALLEL_PODS) as pool:
        return list(pool.map(shape_one, pods.values()))


def link_arguments(shape: NetworkShape) -> list[str]:
    """Rate in bits per second, delay in microseconds, and the sizes of bucket and queue in bytes."""
    bytes_per_second = shape.rate / 8
    queue = max(MIN_QUEUE_BYTES, bytes_per_second * QUEUE_SECONDS, 8 * bytes_per_second * shape.delay)
    return [f"{shape.rate:.0f}", f"{shape.delay * 1e6:.0f}", f"{shape.bucket_bytes:.0f}", f"{queue:.0f}"]


def _find_container(pod: Pod) -> str:
    """The id of the main container at its node's containerd. Raises CapacityError if another runtime runs it."""
    runtime, _, identity = str(main_status(pod).get("containerID") or "").partition("://")
    if runtime != "containerd" or not identity:
        raise CapacityError(
            f"the pod {pod['metadata']['name']} is run by {runtime or 'an unknown runtime'}, not by containerd"
        )
    return identity
