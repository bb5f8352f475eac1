"""How fast results come home, next to `kubectl exec cat` of the same file; then once more over a breaking network.

usage: KUBECONFIG=... python benchmarks/fetch.py IMAGE

Needs a cluster with IMAGE (sh, coreutils) on its nodes, and kubectl. Without them: left out.
"""

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlbench_cli.engines.fetch import download
from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.kubernetes.channel import PodChannel
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.errors import UnreachableError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.objects import collection_path
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.times import now
from tests.fakes.cutting_proxy import CuttingProxy

MIB = 256
ARCHIVE = "run/nodes/0/.state/archive.tar"
ROUNDS = 3
LIMIT = 0.8
START_SECONDS = 300.0  # after which a node is taken not to get the image


def main(image: str) -> None:
    if not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None:
        print("left out: KUBECONFIG is not set, or kubectl is not here")
        return
    access = Access.from_kubeconfig()
    engine = KubernetesEngine(access)
    command = f'head -c {MIB << 20} /dev/urandom > "$MLBENCH_OUTPUT_DIR/noise"'
    spec = RunSpec(
        name="bench-fetch", cluster="c", engine="kubernetes", task="custom", preset="custom",
        argv=("sh", "-c", command), backend="gloo", workers=1, image=image,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = Run("id", spec, Path(folder, "run"), now())
        try:
            engine.submit(run, engine.render(spec))
            _await_end(engine, run)
            with access.client() as api:
                selector = "mlbench/run=bench-fetch,mlbench/role=head"
                (pod,) = api.get(collection_path("Pod", access.namespace), labelSelector=selector)["items"]
            name = pod["metadata"]["name"]
            _, text = channel_of(access, name).exchange("get", path="~/run/nodes/0/.state/results.json")
            facts = json.loads(text)["archive"]
            _compare(access, name, facts, Path(folder))
            _over_a_breaking_network(access, name, facts, Path(folder))
        finally:
            engine.delete(run, force=True)


def _await_end(engine: KubernetesEngine, run: Run) -> None:
    """Wait for the run's end. Leaves the benchmark out if the worker does not start: its node lacks the image."""
    limit = time.monotonic() + START_SECONDS
    with closing(watch(engine, run)) as observations:
        for seen in observations:
            waits = time.monotonic() > limit and all(worker.started is None for worker in seen.workers)
            if seen.ended is None and (waits or any(finding.permanent for finding in seen.findings)):
                why = " ".join(finding.summary for finding in seen.findings)
                raise SystemExit(f"left out: the worker did not start. {why} Load the image first: {run.spec.image}")
            if seen.ended is not None:
                return
    raise SystemExit("the run did not end")


def channel_of(access: Access, pod: str) -> PodChannel:
    return PodChannel(access, access.namespace, pod, lambda: pod)


def _compare(access: Access, pod: str, facts: dict[str, Any], folder: Path) -> None:
    raw, ours = [], []
    channel = channel_of(access, pod)
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        command = ["kubectl", "-n", access.namespace, "exec", pod, "-c", "main", "--", "cat", f"/results/{ARCHIVE}"]
        with open(folder / "raw", "wb") as file:
            subprocess.run(command, check=True, stdout=file)
        raw.append(facts["size"] / (time.perf_counter() - begun) / 1e6)
        begun = time.perf_counter()
        part = folder / "part.tar"
        download(channel, f"~/{ARCHIVE}", facts, part)
        ours.append(facts["size"] / (time.perf_counter() - begun) / 1e6)
        part.unlink()
    print(f"kubectl exec cat   {statistics.median(raw):6.0f} MB/s  ({', '.join(f'{speed:.0f}' for speed in raw)})")
    print(f"mlbench, verified  {statistics.median(ours):6.0f} MB/s  ({', '.join(f'{speed:.0f}' for speed in ours)})")
    print(f"ratio              {statistics.median(ours) / statistics.median(raw):6.2f}       (at least {LIMIT})")


def _over_a_breaking_network(access: Access, pod: str, facts: dict[str, Any], folder: Path) -> None:
    upstream = urlsplit(access.server)
    with CuttingProxy(str(upstream.hostname), upstream.port or 443, least=1 << 20, most=48 << 20) as proxy:
        through = replace(access, server=f"https://127.0.0.1:{proxy.port}", server_name=upstream.hostname)
        begun = time.perf_counter()
        part = folder / "cut.tar"
        while True:
            try:
                download(channel_of(through, pod), f"~/{ARCHIVE}", facts, part)
                break
            except UnreachableError:
                continue  # as `mlbench wait` does, from where it stopped
        seconds = time.perf_counter() - begun
        is_right = hashlib.sha256(part.read_bytes()).hexdigest() == facts["sha256"]
    print(f"with {proxy.cuts} connections cut: {seconds:.1f} s, digest {'right' if is_right else 'WRONG'}")


if __name__ == "__main__":
    if len(sys.argv) < 2 and not os.environ.get("LAB_TEST_IMAGE"):
        print("left out: no image is named")
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else os.environ["LAB_TEST_IMAGE"])
