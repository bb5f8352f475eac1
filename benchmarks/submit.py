"""How long a submission takes, next to `kubectl apply` of the same manifests: whole processes, one after the other.

usage: KUBECONFIG=... python benchmarks/submit.py [IMAGE]

Needs a cluster and kubectl; IMAGE need not exist, since what is applied stays suspended. Without them: left out.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import templates
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.errors import MlbenchError
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.util.times import now

ROUNDS = 9
LIMIT = 1.5
CLIENT = """
import json, sys
from pathlib import Path
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
engine = KubernetesEngine(Access.from_kubeconfig())
run = Run("id", RunSpec.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]), "2026-01-01T00:00:00Z")
engine.submit(run, engine.render(run.spec))
"""


def main(image: str) -> None:
    if not os.environ.get("KUBECONFIG") or shutil.which("kubectl") is None:
        print("left out: KUBECONFIG is not set, or kubectl is not here")
        return
    engine = KubernetesEngine(Access.from_kubeconfig())
    spec = RunSpec(
        name="bench-submit",
        cluster="c",
        engine="kubernetes",
        task="custom",
        preset="custom",
        argv=("true",),
        backend="gloo",
        workers=2,
        image=image,
        # A queue that nobody serves: both leave a suspended Job, and no pod disturbs the clock.
        kubernetes=KubernetesOptions(queue="nobody"),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run("id", spec, Path(folder, "run"), now())
        file = Path(folder, "manifests.yaml")
        file.write_text(templates.dump(engine.render(spec).documents))
        ours = [sys.executable, "-c", CLIENT, _json(spec), str(run.folder)]
        theirs = ["kubectl", "apply", "-f", str(file)]
        times: dict[str, list[float]] = {"kubectl apply": [], "mlbench": []}
        try:
            for _ in range(ROUNDS):
                for name, command in (("kubectl apply", theirs), ("mlbench", ours)):
                    engine.delete(run, force=True)
                    times[name].append(_seconds(command))
        except MlbenchError as error:
            print(f"left out: {error.message}")
            return
        finally:
            engine.delete(run, force=True)
    for name, measured in times.items():
        print(f"{name:14} {statistics.median(measured) * 1000:7.0f} ms  (least {min(measured) * 1000:.0f})")
    ratio = statistics.median(times["mlbench"]) / statistics.median(times["kubectl apply"])
    print(f"ratio          {ratio:7.2f}     (limit {LIMIT})")


def _seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def _json(spec: RunSpec) -> str:
    import json

    return json.dumps(spec.to_dict())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "image:1")
