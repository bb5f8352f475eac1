"""Run `helm`. Credentials and values are passed in files that exist only in memory.

Such a file has no name on disk and disappears with the last process that has it open, even after a kill.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.kube.access import Access
from providers.file_locks import inheritable_lock
from providers.helm.source import Chart

MIN_HELM_VERSION = (3, 13)  # the first version that supports labels on releases
INSTALL = "https://helm.sh/docs/intro/install/"
CALL_SECONDS = 60.0
END_SECONDS = 20.0  # time for helm to record on the cluster that it was stopped
DEBUG = re.compile(r"^\S+ .*?\[debug\] (?P<words>.*)$")


@dataclass(frozen=True)
class Helm:
    """The helm program and its version."""

    path: str
    version: str


def find_helm() -> Helm | None:
    """The helm of this machine. Raises UsageError if it is too old, or does not run."""
    path = shutil.which("helm")
    if path is None:
        return None
    command = [path, "version", "--template", "{{.Version}}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CALL_SECONDS, check=False, env=_environment("/nonexistent")
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{path} cannot be run: {error}.", hint=f"Get helm: {INSTALL}") from None
    match = re.search(r"v(\d+)\.(\d+)\S*", done.stdout)
    if done.returncode or match is None:
        said = (done.stderr or done.stdout).strip()[-300:]
        raise UsageError(f"{path} did not print its version: {said}", hint=f"Get helm: {INSTALL}")
    if (int(match[1]), int(match[2])) < MIN_HELM_VERSION:
        raise UsageError(
            f"{path} is {match[0]}; {MIN_HELM_VERSION[0]}.{MIN_HELM_VERSION[1]} or later is needed.", hint=INSTALL
        )
    return Helm(path, match[0])


def render_template(helm: Helm, chart: Chart, namespace: str, values: Mapping[str, Any]) -> str:
    """The output of `helm template`, without a cluster. Raises UsageError with helm's message."""
    words = ["template", chart.name, str(chart.folder), "--namespace", namespace]
    with HelmCall(helm, words, values=values) as call:
        call.wait(CALL_SECONDS)
        if call.code == 0:
            return call.output
        if call.code is not None and call.code < 0:
            raise UsageError(f"The chart {chart.name} {chart.version} was not rendered within {CALL_SECONDS:.0f} s.")
        raise UsageError(
            f"The chart {chart.name} {chart.version} cannot be rendered with these values: {call.complaint}",
            hint=f"helm show values {chart.source}   shows what it takes"
            if "://" not in chart.source
            else "helm show values shows what it takes.",
        )


class HelmCall:
    """A running helm: its output so far and its exit code. Leaving the `with` block ends it.

    `lock` excludes other helm calls of this user with the same name; helm keeps it if this process is killed. Raises
    MlbenchError if it is taken.
    """

    def __init__(
        self,
        helm: Helm,
        words: Sequence[str],
        *,
        access: Access | None = None,
        values: Mapping[str, Any] | None = None,
        lock: str | None = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            home = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mlbench-helm-"))
            given, argv = [], [helm.path, *words]
            if lock is not None:
                holder = self._stack.enter_context(inheritable_lock("helm", lock))
                if holder is None:
                    raise MlbenchError(f"Another helm process is working on {lock}.", hint="Wait for it, then repeat.")
                given.append(holder)
            confidential = {
                "--kubeconfig": access.compose_kubeconfig("cluster") if access else None,
                "--values": values,
            }
            for flag, document in confidential.items():
                if document is not None:
                    file, path = self._file(home, json.dumps(document))
                    given.append(file)
                    argv += [flag, path]
            self._out, self._err = self._file(home)[0], self._file(home)[0]
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                pass_fds=given,
                env=_environment(home),
                start_new_session=True,  # We handle Ctrl-C and send helm a signal, so that it records its end
            )
            undo.pop_all()

    def __enter__(self) -> "HelmCall":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def code(self) -> int | None:
        """helm's exit code; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Helm's standard output so far."""
        return self._read(self._out)

    @property
    def line(self) -> str:
        """The current action, from the last --debug line; other lines are errors or source locations."""
        lines = [match["words"] for line in self._read(self._err).splitlines() if (match := DEBUG.match(line))]
        return lines[-1].strip() if lines else ""

    @property
    def complaint(self) -> str:
        """Helm's error message."""
        lines = self._read(self._err).splitlines()
        start = next((number for number, line in enumerate(lines) if line.startswith("Error:")), max(0, len(lines) - 5))
        # With --debug, the error is repeated with source locations.
        spoken = takewhile(lambda line: not DEBUG.match(line), lines[start:])
        words = "\n".join(line for line in map(str.strip, spoken) if line and "Use --debug flag" not in line)
        return words[:1500] or f"exit code {self.code}"

    def wait(self, seconds: float) -> None:
        """Wait for its end; stop it after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        """Stop it, first with SIGTERM, and delete files with credentials."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output = {file: self._read(file) for file in (self._out, self._err)}
        self._stack.close()

    def _file(self, home: str, text: str = "") -> tuple[int, str]:
        """A file of this user alone: its descriptor, and the path by which a helm that inherits it finds it.

        In memory if possible, otherwise in `home`, which is deleted when helm ends.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("mlbench")
            path = f"/proc/self/fd/{file}"
        else:
            file, path = tempfile.mkstemp(dir=home)
        self._stack.callback(os.close, file)
        os.fchmod(file, 0o600)
        os.write(file, text.encode())
        return file, path

    def _read(self, file: int) -> str:
        said: dict[int, str] = getattr(self, "_output", {})
        if file in said:
            return said[file]
        return os.pread(file, 1 << 24, 0).decode("utf-8", "replace")


def _environment(home: str) -> dict[str, str]:
    """The environment without the user's helm settings, plug-ins and clusters, for reproducible behavior."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HELM_", "KUBECONFIG"))}
    return {
        **kept,
        **{f"HELM_{kind}_HOME": str(Path(home) / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
    }
