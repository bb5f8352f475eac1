"""What following 1 000 workers costs: requests, memory and CPU of the client, with the API double in another process.

usage: python benchmarks/follow_pods.py [PODS...]

The limits are for 1,000 pods; 4,096 pods may take 300 MB. Run it on a quiet machine.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.manifests import manifests
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.times import now
from tests.fakes.kube_api import KubeApi

SECONDS = 30.0
MEMORY_LIMIT = 100
CPU_LIMIT = 10
PODS = "/api/v1/namespaces/default/pods"


def main(sizes: list[int]) -> None:
    print(
        f"{SECONDS:.0f} s; limits: {MEMORY_LIMIT} MB, {CPU_LIMIT} % of a core, as many lists and watches for any number"
    )
    print(f"{'pods':>6} {'lists':>6} {'watches':>8} {'other':>6} {'log requests':>13} {'memory':>10} {'CPU':>8}")
    for size in sizes:
        with KubeApi() as server:
            for index in range(size):
                put_pod(server, index, size)
            words = [sys.executable, __file__, "client", server.url, str(size)]
            client = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            for step in range(int(SECONDS) - 2):
                time.sleep(1)
                for index in range(step, size, 50):  # some change all the time
                    put_pod(server, index, size)
            output, _ = client.communicate()
            report(server, size, json.loads(output))


def spec_of_size(size: int) -> RunSpec:
    return RunSpec(
        name=f"r-{size}", cluster="c", engine="kubernetes", task="custom", preset="custom", argv=("true",),
        backend="gloo", workers=size, image="image:1",
    )  # fmt: skip


@cache
def template_of_size(size: int) -> dict[str, Any]:
    """The pod template of the run's own Job."""
    return dict(manifests(spec_of_size(size), "default")[0]["spec"]["template"])


def put_pod(server: KubeApi, index: int, size: int) -> None:
    """A running pod as the API server shows it: the Job's template, what admission adds, status and managed fields."""
    template = template_of_size(size)
    name = f"r-{size}-{index}-x"
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    (container,) = template["spec"]["containers"]
    fields: dict[str, Any] = {f"f:{key}": {} for key in container}
    fields["f:env"] = {f'k:{{"name":"{item["name"]}"}}': {".": {}, "f:name": {}} for item in container["env"]}
    server.put(
        "pods",
        {
            "metadata": {
                **template["metadata"],
                "name": name,
                "labels": {**template["metadata"]["labels"], INDEX_LABEL: str(index)},
                "managedFields": [
                    {"manager": manager, "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": fields}
                    for manager in ("kube-controller-manager", "kubelet")
                ],
            },
            "spec": {**template["spec"], "nodeName": f"node-{index}"},
            "status": {
                "phase": "Running",
                "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "Initialized")],
                "containerStatuses": [{"name": "main", "state": state, "restartCount": 0}],
            },
        },
    )
    server.logs.setdefault(name, [b"at work"])


def client(url: str, size: int) -> None:
    """Follow the run for a while, then say what it took."""
    engine = KubernetesEngine(Access(url))
    spec = spec_of_size(size)
    with tempfile.TemporaryDirectory() as folder:
        run = Run("id", spec, Path(folder), now())
        engine.submit(run, engine.render(spec))
        begun = None
        for _ in watch(engine, run):
            if begun is None:
                begun, used = time.monotonic(), time.process_time()
            if time.monotonic() - begun >= SECONDS:
                break
        assert begun is not None
        share = (time.process_time() - used) / (time.monotonic() - begun)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"memory": memory, "cpu": 100 * share}))
    sys.stdout.flush()


def report(server: KubeApi, size: int, figures: dict[str, float]) -> None:
    lists = server.requests[f"GET {PODS}"]
    watches = server.requests[f"GET {PODS} watch"]
    logs = sum(count for request, count in server.requests.items() if request.endswith("/log"))
    other = sum(server.requests.values()) - lists - watches - logs
    memory, cpu = f"{figures['memory']:.0f} MB", f"{figures['cpu']:.1f} %"
    print(f"{size:>6} {lists:>6} {watches:>8} {other:>6} {logs:>13} {memory:>10} {cpu:>8}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        client(sys.argv[2], int(sys.argv[3]))
    else:
        main([int(word) for word in sys.argv[1:]] or [10, 1000])
