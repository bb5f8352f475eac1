"""The real Kubernetes that the doubles of the clouds hand out: a KIND cluster whose workers look like a cloud's."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlbench_cli.kube.access import Access

NODE_IMAGE = os.environ.get("MLBENCH_TEST_NODE_IMAGE")
SHELL_IMAGE = os.environ.get("MLBENCH_TEST_LOAD_IMAGE")
NAME = "mlbench-gate-2"  # two machines for workers, and the control plane
LABELS = {"mlbench-role": "worker", "nvidia.com/gpu.present": "true"}
DEVICES = {"nvidia.com/gpu": 1, "vpc.amazonaws.com/efa": 1}


def mlbench(environment: dict[str, str], *words: str, code: int = 0) -> str:
    """Standard output of one command line, which must end with `code`."""
    command = [sys.executable, "-m", "mlbench_cli", *words]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == code, f"mlbench {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


@contextmanager
def kubernetes(folder: Path) -> Iterator[Access]:
    """The way to the cluster by its own certificates. Its workers bear our labels, and devices that are none."""
    if given := os.environ.get("MLBENCH_TEST_KUBECONFIG"):  # one that is there, and stays
        access = Access.from_kubeconfig(Path(given))
        _equip(access)
        yield access
        return
    environment = {"MLBENCH_HOME": str(folder)}
    image = ["--image", NODE_IMAGE] if NODE_IMAGE else []
    try:
        release = NAME.rpartition("-")[0]
        mlbench(environment, "create-cluster", "kind", "2", release, "--load", str(SHELL_IMAGE), *image)
        file = folder / "kubeconfig"
        subprocess.run(["kind", "export", "kubeconfig", "--name", NAME, "--kubeconfig", str(file)], check=True)
        access = Access.from_kubeconfig(file)
        _equip(access)
        yield access
    finally:
        subprocess.run(["kind", "delete", "cluster", "--name", NAME], check=False, capture_output=True)
        subprocess.run(["docker", "volume", "rm", "-f", f"mlbench-{NAME}"], check=False, capture_output=True)


def _equip(access: Access) -> None:
    added = [
        {"op": "add", "path": f"/status/capacity/{name.replace('/', '~1')}", "value": str(count)}
        for name, count in DEVICES.items()
    ]
    with access.client() as api:
        for node in api.get("/api/v1/nodes")["items"]:
            if "node-role.kubernetes.io/control-plane" in node["metadata"]["labels"]:
                continue
            path = f"/api/v1/nodes/{node['metadata']['name']}"
            labels = {"metadata": {"labels": LABELS}}
            api.request("PATCH", path, body=labels, content_type="application/merge-patch+json")
            api.request("PATCH", f"{path}/status", body=added, content_type="application/json-patch+json")


def story(environment: dict[str, str], cluster: str, folder: Path, *more: str) -> dict[str, Any]:
    """Run, read, download and verify on `cluster`, which is the current one; the archive's run.json and result.json."""
    name = f"{cluster}-run"
    command = "sh -c 'echo rank $RANK of $WORLD_SIZE; echo done > $MLBENCH_OUTPUT_DIR/result'"
    words = ("--image", str(SHELL_IMAGE), "--command", command, "--backend", "gloo", *more, "--yes")
    printed: dict[str, Any] = json.loads(mlbench(environment, "run", name, "2", *words, "-o", "json"))["runs"][0]
    assert printed["outcome"] == "completed"
    assert "rank 1 of 2" in mlbench(environment, "logs", f"{name}-2", "--rank", "1")
    archive = folder / "results.zip"
    mlbench(environment, "download", f"{name}-2", "--output", str(archive))
    mlbench(environment, "verify", str(archive))
    status = json.loads(mlbench(environment, "status", "--cluster", cluster, "-o", "json"))
    assert {item["state"] for item in status["resources"]} == {"ready"}
    mlbench(environment, "delete", f"{name}-2", "--yes")
    with zipfile.ZipFile(archive) as file:
        members = {Path(member).name: member for member in file.namelist()}
        return {name: json.loads(file.read(members[name])) for name in ("run.json", "result.json")}
