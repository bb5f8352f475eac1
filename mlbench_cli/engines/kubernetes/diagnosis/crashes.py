"""Explain a worker's exit code and the last lines of its log."""

import re
import signal
from collections.abc import Callable

from mlbench_cli.engines.crashes import (
    describe_signal,
    explain_driver,
    explain_exit,
    explain_log,
    last_lines,
)
from mlbench_cli.model.run import Finding
from mlbench_cli.util.text import shorten_line

EVIDENCE_LINES = 40

SHARED_MEMORY = re.compile(
    r"unable to (write to|open|mmap \d+ bytes from) (the )?(file|shared memory)[^\n]*torch_"
    r"|insufficient shared memory|out of shared memory|/dev/shm[^\n]*No space left|No space left[^\n]*/dev/shm"
    r"|failed to extend /dev/shm|creating shared memory segment /dev/shm"
)
ARCHITECTURE = re.compile(r"exec format error", re.IGNORECASE)
RUNTIME = re.compile(r"^.*OCI runtime create failed:.*?(?=exec: )|: unknown$")
INIT_KILLED = re.compile(r"container init was OOM-killed")
# The command itself, by the words of runc, crun and youki. A node may also lack the runtime: exec: "nvidia-…".
NO_COMMAND = re.compile(r"container process.*exec: \\?\"|executable (?:file )?`.*not found|exec failed", re.DOTALL)
DISK = re.compile(r"No space left on device|Disk quota exceeded")


def crash(
    name: str, worker: int, code: int, reason: str, message: str, log: str, memory: str | None = None, node: str = ""
) -> Finding:
    """The finding on a worker whose command ended badly, or whose container was never made.

    `reason` and `message` are the container's; `log` is the end of the worker's log, if it is at hand; `memory` is its
    limit, which it has reached when the kernel kills it for memory.
    """
    lines = last_lines(log or message, EVIDENCE_LINES)
    evidence = {"worker": worker, "exit_code": code, "reason": reason or None, "log": lines}
    text = f"{message}\n{log}"
    who, logs = f"Worker {worker}", f"mlbench logs {name} --rank {worker}"

    def finding(kind: str, summary: str, hint: str, *, retryable: bool = False) -> Finding:
        return Finding(kind, summary, hint, retryable=retryable, evidence=evidence)

    if reason == "ContainerStatusUnknown":
        return finding(
            "container_lost",
            f"The node {node} no longer knows how the container of worker {worker} ended: {shorten_line(message)}",
            f"Run it again. kubectl describe node {node}",
            retryable=True,
        )
    if reason == "OOMKilled" or INIT_KILLED.search(message):
        return finding(
            "out_of_memory",
            f"Worker {worker} used more memory than its limit{f' of {memory}' if memory else ''} and was killed.",
            "Raise --memory (/dev/shm counts toward it), or use a smaller batch.",
        )
    if reason in ("StartError", "ContainerCannotRun") or code in (126, 127, 128):
        if ARCHITECTURE.search(text):
            return _architecture(finding, worker)
        words = RUNTIME.sub("", lines[-1]) if lines else f"exit code {code}"
        never_made = reason in ("StartError", "ContainerCannotRun")
        if never_made and (found := explain_driver(who, message, evidence, node=node, words=words)):
            return found
        if never_made and not NO_COMMAND.search(message):
            return finding(
                "container_not_created",
                f"The node {node} could not create the container of worker {worker}: {shorten_line(message) or words}",
                "Run it again on other nodes; if these say the same, check the image and --pod-patch. "
                f"kubectl describe node {node}",
                retryable=True,
            )
        return finding("command_not_found", f"The command of worker {worker} could not be started: {words}", logs)
    if ARCHITECTURE.search(text):
        return _architecture(finding, worker)
    if code == 128 + signal.SIGBUS or SHARED_MEMORY.search(text):
        return finding("shm_exhausted", f"Worker {worker} ran out of shared memory (/dev/shm).", "Raise --shm.")
    if found := explain_log(who, text, logs, evidence, node):
        return found
    if DISK.search(text):
        return finding(
            "disk_full", f"Worker {worker} ran out of disk space.", f"Write less to the output folder. {logs}"
        )
    return explain_exit(who, code, _how(code), logs, evidence)


def _architecture(finding: Callable[..., Finding], worker: int) -> Finding:
    return finding(
        "wrong_architecture",
        f"The image of worker {worker} is for a different CPU architecture than its node.",
        "mlbench images push --platform linux/amd64   (or linux/arm64, matching the nodes), or select other nodes: "
        "--node-selector kubernetes.io/arch=ARCH",
    )


def _how(code: int) -> str:
    """As a shell tells it: code 128 + N stands for signal N, if there is one."""
    return describe_signal(code - 128) if code - 128 in set(signal.Signals) else f"exited with {code}"
