"""Nodes and the Job controller for the double of the Kubernetes API: each container is a real process of start.sh.

The rules are those of Indexed Jobs (Kubernetes' reference, batch/v1 JobSpec): a pod that fails ends the Job by its
podFailurePolicy, the success of index 0 ends it by its successPolicy, its deadline counts from its release, a Job that
is suspended or over has its other pods deleted, and a pod that is deleted gets TERM, and KILL after its grace period.
"""

import base64
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL
from tests.fakes.kube_api import KubeApi, stamp
from tests.fakes.ports import reserve_port

ROOT = Path(__file__).parents[2]
IMAGE_ID = f"docker.io/library/image@sha256:{'0' * 64}"
LOOK_SECONDS = 0.05


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def describe_container(state: dict[str, Any]) -> dict[str, Any]:
    return {"name": "main", "state": state, "imageID": IMAGE_ID}


@dataclass
class Container:
    """A pod's process, what stands for its /results, and its Job's uid: another one may have the same name."""

    job: str
    folder: Path
    process: subprocess.Popen[bytes]
    document: dict[str, Any]
    written: int = 0  # bytes of its log that the server has
    kill_at: float | None = None  # by the monotonic clock, once it was told to end
    code: int | None = None
    conditions: tuple[dict[str, str], ...] = ()


@dataclass
class Kubelet:
    """Runs the pods of every released Job in folders below `folder`; `with Kubelet(server, folder):` ends all of them.

    The file `down` in it has the indices of pods whose nodes do not start them.
    """

    server: KubeApi
    folder: Path
    has_python: bool = True  # whether images do
    python: Path = Path(sys.executable)  # theirs
    head_host: str = "127.0.0.1"  # under which pods look for that of their run

    def __post_init__(self) -> None:
        self._containers: dict[str, Container] = {}
        self._ports: dict[str, tuple[socket.socket, int]] = {}  # of a run's head
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "Kubelet":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for container in self._containers.values():
            self._kill(container)
        for held, _number in self._ports.values():
            held.close()

    def process_of(self, pod: str) -> int:
        """The main process of a pod's container."""
        return self._containers[pod].process.pid

    def lose(self, pod: str) -> None:
        """The pod's node is gone, and the cluster has given it up."""
        container = self._containers[pod]
        container.code = -1
        self._kill(container)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        document = self.server.objects["pods", pod]
        self.server.put("pods", {**document, "status": {**document["status"], "conditions": [condition]}})
        self.server.folders.pop(pod, None)

    def evict(self, pod: str) -> None:
        """What `kubectl drain` does. The pod is there until the Job controller has counted it."""
        container, document = self._containers[pod], self.server.objects["pods", pod]
        container.conditions = ({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},)
        self.server.put("pods", {**document, "status": {**document["status"], "conditions": container.conditions}})
        os.kill(container.process.pid, signal.SIGTERM)

    def _serve(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            with self.server.lock:
                jobs = [item for (kind, _), item in self.server.objects.items() if kind == "jobs"]
            known = {job["metadata"]["uid"] for job in jobs}
            for name, container in list(self._containers.items()):
                if container.job not in known:
                    self._kill(container)
                    self._forget(name)
            for job in jobs:
                self._control(job)
            for name, container in self._containers.items():
                if ("pods", name) not in self.server.objects and container.kill_at is None:
                    self._end(container, 1.0)  # somebody has deleted the pod
                if container.kill_at is not None and time.monotonic() >= container.kill_at:
                    self._kill(container)
                if container.code is None:
                    self._report(name, container)

    def _control(self, job: Mapping[str, Any]) -> None:
        """What the Job controller does."""
        name, spec = job["metadata"]["name"], job["spec"]
        own = {key: item for key, item in self._containers.items() if item.job == job["metadata"]["uid"]}
        done = {item["type"] for item in job.get("status", {}).get("conditions", ())}
        if spec.get("suspend") or done:
            for pod, container in own.items():
                known = self.server.objects.get(("pods", pod))  # or somebody has deleted it
                if container.code is None and container.kill_at is None and known is not None:
                    metadata = {**known["metadata"], "deletionTimestamp": self.server.now}
                    self.server.put("pods", {**known, "metadata": metadata})
                    self._end(container, float(spec["template"]["spec"].get("terminationGracePeriodSeconds", 30)))
            return
        if "startTime" not in job.get("status", {}):
            self._set_status(name, startTime=self.server.now)
        elif seconds_between(job["status"]["startTime"], self.server.now) > spec.get("activeDeadlineSeconds", math.inf):
            self._finish(name, "Failed", "DeadlineExceeded")
            return
        down = (self.folder / "down").read_text().split() if (self.folder / "down").exists() else []
        for index in range(min(spec["completions"], spec["parallelism"])):
            tries = [pod for pod in own if pod.startswith(f"{name}-{index}-")]
            have_failed = all(own[pod].code not in (None, 0) for pod in tries)
            may_retry = len(tries) <= spec.get("backoffLimit", 6) and have_failed
            pod = f"{name}-{index}-{'xyzuvw'[len(tries)]}" if len(tries) < 6 else ""
            if pod and (not tries or may_retry) and str(index) not in down:
                self._start(job, pod, index)
        codes = {key: item.code for key, item in own.items() if item.code is not None}
        if "successPolicy" in spec and codes.get(f"{name}-0-x") == 0:
            self._finish(name, "Complete", "SuccessPolicy")
        elif any(codes.values()) and spec.get("backoffLimit", 6) == 0:
            self._finish(name, "Failed", "PodFailurePolicy")
        elif len(codes) == spec["completions"] and not any(codes.values()):
            self._finish(name, "Complete", "CompletionsReached")

    def _finish(self, job: str, kind: str, reason: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": self.server.now}
        self._set_status(job, conditions=[condition])

    def _set_status(self, job: str, **status: Any) -> None:
        """Change the status alone: a client may have changed or deleted the Job since it was listed."""
        with self.server.lock:
            if (known := self.server.objects.get(("jobs", job))) is not None:
                self.server.put("jobs", {**known, "status": {**known.get("status", {}), **status}})

    def _start(self, job: Mapping[str, Any], name: str, index: int) -> None:
        template = job["spec"]["template"]
        labels, (main, *_) = template["metadata"]["labels"], template["spec"]["containers"]
        run = labels["mlbench/run"]
        folder, mount = self.folder / name / "results", self.folder / name / "mlbench"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier pod of that name
        folder.mkdir(parents=True, exist_ok=True)
        mount.mkdir(exist_ok=True)
        config = self.server.objects.get(("configmaps", run))
        if config is None:  # the run was deleted since its Job was listed
            return
        for key, text in config.get("data", {}).items():
            (mount / key).write_text(text)
        for key, text in config.get("binaryData", {}).items():
            (mount / key).write_bytes(base64.b64decode(text))
        if run not in self._ports:
            self._ports[run] = reserve_port()
        port = self._ports[run][1]
        is_head = labels["mlbench/role"] == "head"
        own = {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}" if self.has_python else self._plain_programs(),
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "JOB_COMPLETION_INDEX": str(index),
            "MLBENCH_WORK_DIR": str(folder),
            "MLBENCH_MOUNT": str(mount),
            "MLBENCH_HEAD": f"{'' if is_head else self.head_host}:{port}",
            "MLBENCH_HEAD_TOKEN": run,
            "MLBENCH_TERMINATION_LOG": str(folder.with_name("termination")),
            "MASTER_ADDR": "127.0.0.1",
            **({"LD_PRELOAD": os.environ["LD_PRELOAD"]} if "LD_PRELOAD" in os.environ else {}),  # as of an image
        }
        variables = {item["name"]: str(item["value"]).replace("$$", "$") for item in main["env"] if "value" in item}
        words = [word.replace("/mlbench/", f"{mount}/") for word in main["command"]]
        words += [word.replace("$$", "$") for word in main.get("args", ())]
        with open(folder.with_name("log"), "wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", *words[1:]],
                env=variables | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        state = {"running": {"startedAt": stamp()[:19] + "Z"}}
        owner = {"uid": job["metadata"]["uid"], "kind": "Job", "name": job["metadata"]["name"], "controller": True}
        index_label = {} if is_head else {INDEX_LABEL: str(index)}
        document = {
            "metadata": {"name": name, "labels": {**labels, **index_label}, "ownerReferences": [owner]},
            "spec": {**template["spec"], "nodeName": f"node-{index}"},
            "status": {"phase": "Running", "containerStatuses": [describe_container(state)]},
        }
        self._containers[name] = Container(job["metadata"]["uid"], folder, process, document)
        self.server.folders[name] = folder
        self.server.put("pods", document)

    def _plain_programs(self) -> str:
        """A folder with the programs of an image that has no Python."""
        place = self.folder / "programs"
        place.mkdir(parents=True, exist_ok=True)
        for name in ("sh", "mkdir", "sleep", "cat"):
            with suppress(FileExistsError):
                (place / name).symlink_to(str(shutil.which(name)))
        return str(place)

    def _end(self, container: Container, grace: float) -> None:
        """TERM to the container's first process, as the kubelet does."""
        container.kill_at = time.monotonic() + grace
        with suppress(ProcessLookupError):
            os.kill(container.process.pid, signal.SIGTERM)

    def _kill(self, container: Container) -> None:
        """KILL to everything in the container."""
        marks = os.fsencode(str(container.folder))
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if marks in Path(f"/proc/{pid}/environ").read_bytes() and int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
        container.process.wait()

    def _forget(self, name: str) -> None:
        """Of a pod whose Job is gone nothing is left, so that the next Job of that name has its own."""
        del self._containers[name]
        self.server.logs.pop(name, None)
        self.server.folders.pop(name, None)
        self.server.remove("pods", name)

    def _report(self, name: str, container: Container) -> None:
        """New lines of the pod's log, and its end."""
        code = container.process.poll()
        data = container.folder.with_name("log").read_bytes()[container.written :]
        whole = data if code is not None else data[: data.rfind(b"\n") + 1]
        container.written += len(whole)
        self.server.write(name, *whole.splitlines())
        if code is None:
            return
        container.code = code if code >= 0 else 128 - code
        self._kill(container)
        self.server.folders.pop(name, None)
        if container.kill_at is not None:  # its pod has been deleted, and may go now
            self.server.remove("pods", name)
            return
        times = {"startedAt": container.document["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]}
        last = container.folder.with_name("termination")
        message = last.read_text() if last.exists() else ""
        facts = {"message": message, "exitCode": container.code, "finishedAt": stamp()[:19] + "Z", **times}
        phase = "Failed" if container.code else "Succeeded"
        statuses = [describe_container({"terminated": facts})]
        status = {"phase": phase, "containerStatuses": statuses, "conditions": container.conditions}
        self.server.put("pods", {**container.document, "status": status})
