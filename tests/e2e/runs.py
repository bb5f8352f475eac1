"""Runs of the kubernetes engine on a real cluster, and what tests and benchmarks ask of them."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.objects import collection_path
from mlbench_cli.model.run import Observation, Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.util.times import now


@dataclass(frozen=True)
class Cluster:
    """Two worker nodes that have both images; runs go into the namespace of `access`."""

    access: Access
    image: str  # with sh and python3
    torch_image: str
    kubeconfig: Path

    @property
    def engine(self) -> KubernetesEngine:
        return KubernetesEngine(self.access)

    def spec(self, name: str, *argv: str, options: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
        fields: dict[str, Any] = {"workers": 2, "image": self.image, "backend": "gloo", **changes}
        return RunSpec(
            name=name,
            cluster="c",
            engine="kubernetes",
            task="custom",
            preset="custom",
            argv=argv,
            kubernetes=KubernetesOptions(**(options or {})),
            **fields,
        )


@contextmanager
def restricted_namespace(access: Access) -> Iterator[Access]:
    """The same access in a new namespace where Pod Security is restricted; it goes afterwards."""
    namespace = f"e2e-{os.getpid()}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    with access.client() as api:
        api.create("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
        try:
            yield replace(access, namespace=namespace)
        finally:
            api.delete(f"/api/v1/namespaces/{namespace}")


class Runs:
    """Starts runs, and removes them after the test."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.started: list[Run] = []

    def start(self, spec: RunSpec, folder: Path, access: Access | None = None) -> tuple[KubernetesEngine, Run]:
        engine = KubernetesEngine(access or self.cluster.access)
        run = Run(f"id-{spec.name}", spec, folder, now())
        self.started.append(run)
        engine.submit(run, engine.render(spec))
        return engine, run

    def remove(self) -> None:
        for run in self.started:
            self.cluster.engine.delete(run, force=True)
        with self.cluster.access.client() as api:
            for kind in ("Job", "Pod", "Service", "NetworkPolicy"):
                left = api.get(collection_path(kind, self.cluster.access.namespace), labelSelector="mlbench/run")
                names = {item["metadata"]["labels"]["mlbench/run"] for item in left["items"]}
                assert not names & {run.name for run in self.started}


def until(engine: KubernetesEngine, run: Run, wanted: Callable[[Observation], bool]) -> Observation:
    """The first observation that is `wanted`, or the last one."""
    with closing(watch(engine, run)) as observations:
        for seen in observations:
            if wanted(seen):
                break
    return seen


def has_ended(seen: Observation) -> bool:
    return seen.ended is not None


def all_run(seen: Observation) -> bool:
    return all(worker.phase == "running" for worker in seen.workers)


def log(run: Run, rank: int) -> str:
    return (run.folder / "logs" / f"rank-{rank}.log").read_text()
