"""Nodes for the double of the Kubernetes API: each worker's container is a real process of the real worker script."""

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import templates
from mlbench_cli.engines.kubernetes.pods import RUN_LABEL
from mlbench_cli.engines.kubernetes.workers import FIRST_UNIT_LABEL, INDEX_LABEL
from tests.fakes.kube_api import KubeApi, stamp

SCRIPT = templates.FOLDER / "kubernetes" / "worker.sh"
LOOK_SECONDS = 0.1


@dataclass
class Container:
    """One worker's process, what stands for its /results, its Job's name, and the labels of its pod."""

    job: str
    labels: dict[str, str]
    index: int
    folder: Path
    process: subprocess.Popen[bytes]
    started: str
    is_stopped: bool = False


class Kubelet:
    """Starts the pods of every released Job of workers; `with Kubelet(server, folder):` ends all of them.

    Parameter servers, too. There are no keepers: a job of that role gets no pod, as on nodes whose image has no Python.
    `enter(index)` moves the process of a pod into its network; without it, all share this machine's. `master` is the
    address of the first.
    """

    def __init__(
        self,
        server: KubeApi,
        folder: Path,
        enter: Callable[[int], None] | None = None,
        master: str = "127.0.0.1",
    ) -> None:
        self._server, self._folder = server, folder
        self._enter, self._master = enter, master
        self._containers: dict[str, Container] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "Kubelet":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for container in self._containers.values():
            with suppress(ProcessLookupError):
                os.killpg(container.process.pid, signal.SIGKILL)
            container.process.wait()

    def _serve(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            jobs = [document for (kind, _), document in list(self._server.objects.items()) if kind == "jobs"]
            for job in jobs:
                labels = job["spec"]["template"]["metadata"]["labels"]
                if labels.get("mlbench/role") in ("worker", "server") and not job["spec"].get("suspend"):
                    for index in range(job["spec"]["completions"]):
                        self._start(job, index)
            stopped = {job["metadata"]["name"] for job in jobs if job["spec"].get("suspend")}
            for name, container in self._containers.items():
                if container.job in stopped and not container.is_stopped:
                    container.is_stopped = True
                    container.process.terminate()
                self._report(name, container)

    def _start(self, job: Mapping[str, Any], index: int) -> None:
        name = f"{job['metadata']['name']}-{index}-x"
        if name in self._containers:
            return
        unit = index + int(job["spec"]["template"]["metadata"]["labels"].get(FIRST_UNIT_LABEL, 0))
        folder = self._folder / name / "results"
        folder.mkdir(parents=True)
        (spec,) = job["spec"]["template"]["spec"]["containers"]
        variables = {item["name"]: str(item.get("value", "")) for item in spec["env"]}
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "JOB_COMPLETION_INDEX": str(index),
            "MLBENCH_WORK_DIR": str(folder),
            "MLBENCH_TERMINATION_LOG": str(folder.with_name("termination")),
            "MASTER_ADDR": self._master,
            "MLBENCH_PROBE_DIR": str(Path(__file__).parents[2]),
            "TMPDIR": str(folder),
            "MLBENCH_KEEPER": "",
            "MLBENCH_CODE_ZIP": str(folder.with_name("code.zip")),
        }
        code = self._server.objects.get(("configmaps", f"{job['metadata']['labels'][RUN_LABEL]}-code"))
        if code is not None:
            folder.with_name("code.zip").write_bytes(base64.b64decode(code["binaryData"]["code.zip"]))
        with open(folder.with_name("log"), "wb") as log:
            process = subprocess.Popen(
                ["sh", str(SCRIPT), *spec["args"]],
                env=variables | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if self._enter is None else partial(self._enter, unit),
                cwd=Path(__file__).parents[2],
            )
        self._containers[name] = Container(
            job["metadata"]["name"],
            {**job["spec"]["template"]["metadata"]["labels"], INDEX_LABEL: str(index)},
            index,
            folder,
            process,
            stamp()[:19] + "Z",
        )
        self._server.folders[name] = folder

    def _report(self, name: str, container: Container) -> None:
        """The pod's status and new lines of its log; no more of it once it has ended."""
        if name not in self._server.folders:
            return
        code = container.process.poll()
        log = self._server.logs.get(name)
        known = 0 if log is None else sum(len(text) for _, text in log.lines)
        data = container.folder.with_name("log").read_bytes()[known:]
        whole = data if code is not None else data[: data.rfind(b"\n") + 1]
        self._server.write(name, *whole.splitlines(keepends=True))
        state: dict[str, object] = {"running": {"startedAt": container.started}}
        phase = "Running"
        if code is not None:
            phase = "Failed" if code else "Succeeded"
            last = container.folder.with_name("termination")
            message = last.read_text() if last.exists() else ""
            times = {"startedAt": container.started, "finishedAt": stamp()[:19] + "Z"}
            state = {"terminated": {"exitCode": code, "message": message, **times}}
        elif ("pods", name) in self._server.objects:
            return
        statuses = [{"name": "main", "state": state, "containerID": f"containerd://id-{container.index}"}]
        document = {
            "metadata": {"name": name, "labels": container.labels},
            "spec": {"nodeName": f"node-{container.index}"},
            "status": {"phase": phase, "containerStatuses": statuses},
        }
        self._server.put("pods", document)
        if code is not None:
            self._server.end_log(name)
            del self._server.folders[name]
