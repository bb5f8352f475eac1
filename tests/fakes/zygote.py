"""Starts many clients quickly: a process that has imported everything once, and forks one child for each command line.

The children are processes of their own, which may be killed; that is what they are for.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Zygote:
    """`modules` are imported before the first fork; none of them may have started a thread by then."""

    def __init__(self, *modules: str) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
        )

    def run(self, argv: list[str], environment: dict[str, str], pidfile: Path) -> tuple[int, str]:
        """Run `mlbench ARGV`. Returns the exit code (minus the signal if one ended it) and all that was printed."""
        with tempfile.NamedTemporaryFile("r") as output:
            return self._end(argv, environment, pidfile, [output.name, output.name]), output.read()

    def complete(
        self, argv: list[str], environment: dict[str, str], pidfile: Path
    ) -> "subprocess.CompletedProcess[str]":
        """The same, with standard output and standard error apart."""
        with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
            code = self._end(argv, environment, pidfile, [output.name, errors.name])
            return subprocess.CompletedProcess(argv, code, output.read(), errors.read())

    def _end(self, argv: list[str], environment: dict[str, str], pidfile: Path, outputs: list[str]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        case = {"argv": argv, "environment": environment, "pidfile": str(pidfile), "outputs": outputs}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        try:
            return int(self._process.stdout.readline())
        except BaseException:  # the test's time limit: its answer would be taken for that of the next command
            os.kill(int(pidfile.read_text()), signal.SIGKILL)
            self._process.stdout.readline()
            raise

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def child(case: dict[str, Any]) -> int:
    for descriptor, path in enumerate(case["outputs"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    os.environ.update(case["environment"])
    Path(case["pidfile"]).write_text(str(os.getpid()))
    from mlbench_cli.app import run

    code = run(case["argv"])
    sys.stdout.flush()
    return code


def main(modules: list[str]) -> None:
    from importlib import import_module

    for module in modules:
        import_module(module)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(json.loads(line))
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
