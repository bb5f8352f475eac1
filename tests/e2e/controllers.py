"""Kueue in a KIND cluster: built from its Go module, since not every machine can pull their images.

Their own Helm charts install them, with a certificate of their own making, as a cluster's administrator would.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.kube.api import Api
from providers.attached import find_api

TOOLS = ("go", "docker", "kind", "helm")


@dataclass(frozen=True)
class Controller:
    """A controller's module, the program in it, and how its chart is told to use our image."""

    name: str
    group: str  # of its API
    module: str
    version: str
    program: str
    image_values: str  # the prefix of the chart's image settings
    resources: str

    @property
    def image(self) -> str:
        return f"localhost/{self.name}:{self.version}"


KUEUE = Controller(
    "kueue",
    "kueue.x-k8s.io",
    "sigs.k8s.io/kueue",
    "v0.17.0",
    "/cmd/kueue",
    "controllerManager.manager.image",
    "controllerManager.manager.resources",
)


def missing_tool() -> str | None:
    """The first program that is not on the path; None if all are."""
    return next((tool for tool in TOOLS if shutil.which(tool) is None), None)


def install(controller: Controller, api: Api, kubeconfig: Path, kind_cluster: str) -> None:
    """Install it unless the cluster has it."""
    if find_api(api, controller.group) is not None:
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mlbench-e2e")
    folder = cache / f"{controller.name}-{controller.version}"
    program = folder / Path(controller.module + controller.program).name
    module = f"{controller.module}@{controller.version}"
    if not program.exists():
        words = ["go", "install", "-trimpath", "-ldflags=-s -w", controller.module + controller.program]
        words[-1] += f"@{controller.version}"
        _call(*words, CGO_ENABLED="0", GOBIN=str(folder))
    text = f'FROM scratch\nCOPY {program.name} /manager\nUSER 65532:65532\nENTRYPOINT ["/manager"]\n'
    (folder / "Dockerfile").write_text(text, "utf-8")
    _call("docker", "build", "-q", "-t", controller.image, str(folder), DOCKER_BUILDKIT="0")
    _call("kind", "load", "docker-image", controller.image, "--name", kind_cluster)
    chart = Path(json.loads(_call("go", "mod", "download", "-json", module))["Dir"], "charts", controller.name)
    repository, _, tag = controller.image.rpartition(":")
    prefix, resources = controller.image_values, controller.resources
    values = [f"{prefix}.repository={repository}", f"{prefix}.tag={tag}", f"{prefix}.pullPolicy=IfNotPresent"]
    values += [f"{resources}.requests.cpu=50m", f"{resources}.requests.memory=64Mi"]
    words = ["--namespace", f"{controller.name}-system", "--create-namespace", "--wait", "--timeout", "5m"]
    for value in values:
        words += ["--set", value]
    _call("helm", "install", controller.name, str(chart), *words, "--kubeconfig", str(kubeconfig))


def _call(*words: str, **environment: str) -> str:
    done = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
