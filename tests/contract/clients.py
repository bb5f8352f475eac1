"""The tool as a process of its own, forked from the one that runs the tests, which has it loaded already.

Starting Python and importing the tool take a fifth of a second of a core. What is said of the start itself (imports,
closed streams, folders of others) is tried with `python -m mlbench_cli`.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import pytest

from mlbench_cli.__main__ import main
from mlbench_cli.app import run
from mlbench_cli.tasks.catalog import load_catalog

Work = Callable[[], object]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """The JSON document that `mlbench ARGUMENTS -o json` prints, in this process."""
    capsys.readouterr()
    assert run([*arguments, "-o", "json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    return document


def start(*arguments: str, environment: Mapping[str, str] | None = None, **options: Any) -> "subprocess.Popen[str]":
    """`mlbench ARGUMENTS`, with the options of subprocess.Popen."""
    return start_fork(partial(mlbench, arguments), environment, **options)


def finish(
    *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = 280.0, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """The same, with its exit code and what it has printed."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(*arguments, environment=environment, **both, **options) as process:
        out, err = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def start_fork(
    work: Work, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (), **options: Any
) -> "subprocess.Popen[str]":
    """A process that does `work`, whose value is its exit code, and never becomes another program."""
    given = dict(os.environ if environment is None else environment)
    prepare_fork()
    prepare = partial(become, work, given, pass_fds)
    return subprocess.Popen(["mlbench"], preexec_fn=prepare, pass_fds=pass_fds, text=True, **options)


def prepare_fork() -> None:
    """Close the stores that nobody refers to any more: SQLite must not find them open again in a fork. Whoever keeps a
    store open cannot start clients of it in this way."""
    gc.collect()


def mlbench(arguments: Sequence[str]) -> int:
    sys.argv[:] = ["mlbench", *arguments]
    load_catalog.cache_clear()  # other variables may name other tasks
    return main()


def let_go(pass_fds: Sequence[int]) -> None:
    """Put /dev/null in the place of all that was open in the tests' process. Its objects are still here and close their
    descriptors when they end: a number that somebody else had got meanwhile would be closed under them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != nothing and number not in pass_fds:
            with contextlib.suppress(OSError):  # the listing's own
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def become(work: Work, environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> NoReturn:
    """In a forked child: do `work` as a program that has just been started on the descriptors 0 to 2, and end."""
    code: object = 1
    try:
        let_go(pass_fds)
        gc.enable()
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGPIPE, signal.SIG_IGN),
            (signal.SIGXFSZ, signal.SIG_IGN),
        ):
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        code = work()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
