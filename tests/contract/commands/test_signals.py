"""SIGTERM and Ctrl-C end every command soon, with 143 or 130, at whatever moment they come."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.storage.store import Store
from tests import NIGHTLY
from tests.contract import clients
from tests.contract.local_runs import until

# The command's own limit is 1.8 s after the signal; a machine that is five times slower passes, a hang does not.
LIMIT_SECONDS = 60.0
# Calls a function of the tool, named as module:attribute, and sends this process a signal when it is entered.
PROGRAM = """
import importlib, os, signal, sys, time
place, number, *argv = sys.argv[1:]
module, _, path = place.partition(":")
owner = importlib.import_module(module)
*parents, name = path.split(".")
for parent in parents:
    owner = getattr(owner, parent)
real = getattr(owner, name)
def intercept(*arguments, **options):
    setattr(owner, name, real)
    open(os.path.join(os.environ["MLBENCH_HOME"], "entered"), "w").close()
    os.kill(os.getpid(), int(number))
    time.sleep(0.01)
    return real(*arguments, **options)
setattr(owner, name, intercept)
sys.argv = ["mlbench", *argv]
from mlbench_cli.__main__ import main
sys.exit(main())
"""
MLBENCH = "import sys; from mlbench_cli.__main__ import main; sys.exit(main())"
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for row in Store(tmp_path).runs():
        environment = {**os.environ, "MLBENCH_HOME": str(tmp_path)}
        clients.finish("delete", row.run.name, "--force", "--yes", environment=environment)


def start(home: Path, *argv: str, program: str = MLBENCH) -> "subprocess.Popen[str]":
    def work() -> None:
        sys.argv[1:] = argv
        exec(program, {})

    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    return clients.start_fork(work, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    _, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert "Traceback" not in errors
    return process.returncode, errors


PLACES = [
    "mlbench_cli.storage.store:Store.record_experiment",
    "mlbench_cli.engines.local.engine:LocalEngine.submit",
    "mlbench_cli.engines.follow:LogReader.read_new",  # inside of a log's poll, where errors are passed over
    "mlbench_cli.engines.local.engine:LocalHead.read",
    "mlbench_cli.runs.supervise:finalize",
    "mlbench_cli.runs.finalize:seal",
]
# By day one signal at each place, and in each command that only looks.
ALL_MOMENTS = [(place, number) for place in PLACES for number in SIGNALS]
MOMENTS = [(place, SIGNALS[index % 2]) for index, place in enumerate(PLACES)]


@pytest.mark.parametrize(("place", "number"), ALL_MOMENTS if NIGHTLY else MOMENTS)
def test_a_signal_at_any_moment_of_a_run_ends_it(home: Path, place: str, number: int) -> None:
    is_over = place in PLACES[-2:]  # the run has ended, and its agent may complete it before the client does
    for attempt in range(10 if is_over else 1):
        words = ["run", f"a{attempt}", "1", "--command", "sleep 1" if is_over else "sleep 30"]
        code, errors = end(start(home, place, str(int(number)), *words, program=PROGRAM))
        if (home / "entered").exists():
            break
    assert (home / "entered").exists(), errors
    assert code == 128 + number, errors
    assert "Error:" not in errors  # a wanted stop is no error
    for row in Store(home).runs():  # whatever was recorded comes to an end of its own
        until(lambda name=row.run.name: Store(home).run(name).state == "finished" or not _is_running(home, name))  # type: ignore[misc]


def _is_running(home: Path, name: str) -> bool:
    done = clients.finish("status", name, "-o", "json", environment={**os.environ, "MLBENCH_HOME": str(home)})
    return '"phase": "running"' in done.stdout


def test_a_thread_that_nobody_can_stop_does_not_hold_up_the_end(home: Path) -> None:
    program = PROGRAM.replace(
        "sys.argv = [", "import threading; threading.Thread(target=time.sleep, args=(600,)).start()\nsys.argv = ["
    )
    argv = ("mlbench_cli.storage.store:Store.iterate_runs", str(int(signal.SIGTERM)), "status")
    assert end(start(home, *argv, program=program))[0] == 143


def test_a_call_that_blocks_on_with_the_signal_swallowed_is_cut_off(home: Path) -> None:
    stuck = (
        f"def stuck(*a, **o):\n    open({str(home / 'stuck')!r}, 'w').close()\n"
        "    try:\n        time.sleep(600)\n    except BaseException:\n        time.sleep(600)\n"
    )
    program = PROGRAM.replace("setattr(owner, name, intercept)", f"{stuck}setattr(owner, name, stuck)")
    process = start(home, "mlbench_cli.storage.store:Store.iterate_runs", "15", "status", program=program)
    until((home / "stuck").exists)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143
