"""A plugin of pytest: with `--workers N`, N forks of the process that has collected the tests run them.

Importing 500 test modules and torch takes 12 seconds of a core and 1.3 GB, and three times as long in a fresh clone.
Each worker of pytest-xdist does it again; a fork does not. A worker asks for the next unit of work when it is free: the
tests of one group (tests/grouping.py), or one test. Groups and slow tests start first; but one worker begins at the
other end, because quick tests compute while most of the others wait.
"""

import atexit
import ctypes
import gc
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

Unit = list[int]  # positions in session.items
CHECK_SECONDS = 5.0  # a dead worker whose child holds its connection open is noticed after this time
STOP_SECONDS = 30.0  # for the fixtures of a test that is interrupted


class WorkerHooks:
    @pytest.hookspec
    def pytest_worker_start(self, config: pytest.Config, number: int) -> None:
        """Called in each worker before its first test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forks of this process")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(WorkerHooks)


def plan(groups: Iterable[str | None], slow: Collection[int] = ()) -> list[Unit]:
    """Units of work for tests that belong to these groups: the groups, then single tests, those that are `slow` first,
    so that none of them is what all wait for in the end."""
    shared: dict[str, Unit] = {}
    alone: list[Unit] = []
    for position, group in enumerate(groups):
        if group is None:
            alone.append([position])
        else:
            shared.setdefault(group, []).append(position)
    return [*shared.values(), *sorted(alone, key=lambda unit: unit[0] not in slow)]


# In a worker -------------------------------------------------------------------------------------------------------


class Sender:
    """Sends what pytest reports to the parent, in place of the terminal."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config = config
        self.connection = connection
        # pytest-timeout writes stacks there.
        self._tw = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        place = (warning_message.filename, warning_message.lineno)
        self.connection.send(("warning", (text, place, when, nodeid)))


def serve(session: pytest.Session, number: int, connection: Connection) -> None:
    """Run units from the parent until it closes the connection."""
    config = session.config
    # What the parent does at its end is not the worker's to do.
    atexit._clear()
    random.seed()
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    sender = Sender(config, connection)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(sender, "terminalreporter")
    capture.start_global_capturing()
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker-{number}"
    folders._basetemp.mkdir()
    config.hook.pytest_worker_start(config=config, number=number)
    while True:
        try:
            unit: Unit = connection.recv()
        except EOFError:
            return
        for position, following in zip(unit, [*unit[1:], None], strict=True):
            connection.send(("start", position))
            item = session.items[position]
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=None if following is None else session.items[following]
            )
        connection.send(("free", None))


# In the parent -----------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    pid: int
    connection: Connection
    unit: Unit
    running: int | None = None
    from_end: bool = False


class Pool:
    """The workers, and the units that none of them has yet."""

    def __init__(self, session: pytest.Session, units: Iterable[Unit]) -> None:
        self.session = session
        self.units = deque(units)
        self.workers: list[Worker] = []
        self.started = 0

    def start(self) -> None:
        """Fork a worker for the next unit."""
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for connection in (ours, *(worker.connection for worker in self.workers)):
                    connection.close()
                try:
                    serve(self.session, self.started, theirs)
                finally:
                    self.session._setupstate.teardown_exact(None)
                    atexit._run_exitfuncs()
                code = 0
            except KeyboardInterrupt:
                code = 130
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        self.started += 1
        worker = Worker(pid, ours, [], from_end=self.started == 2)
        self.workers.append(worker)
        self.give(worker)

    def give(self, worker: Worker) -> None:
        """Send the next unit, or end a worker for which there is none."""
        if self.units:
            worker.unit = self.units.pop() if worker.from_end else self.units.popleft()
            worker.connection.send(worker.unit)
        else:
            worker.connection.close()
            self.workers.remove(worker)
            _end(worker.pid)

    def run(self, count: int) -> None:
        for _ in range(min(count, len(self.units))):
            self.start()
        while self.workers:
            ready = wait([worker.connection for worker in self.workers], CHECK_SECONDS)
            for worker in [worker for worker in self.workers if worker.connection in ready]:
                self.hear(worker)
            if not ready:
                for worker in list(self.workers):
                    self.bury(worker, os.WNOHANG)
            if self.session.shouldfail:
                raise self.session.Failed(self.session.shouldfail)
            if self.session.shouldstop:
                raise self.session.Interrupted(self.session.shouldstop)

    def hear(self, worker: Worker) -> None:
        """Take one message."""
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionError):
            self.bury(worker, 0)
            return
        hook = self.session.config.hook
        if kind == "report":
            report = hook.pytest_report_from_serializable(config=self.session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            text, place, when, nodeid = value
            message = warnings.WarningMessage(text, UserWarning, *place)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
            )
        elif kind == "start":
            worker.running = value
            worker.unit.remove(value)
            item = self.session.items[value]
            hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        else:
            worker.running = None
            self.give(worker)

    def bury(self, worker: Worker, options: int) -> None:
        """Report the test in which a worker died as failed, and start another worker for the rest of its unit."""
        pid, status = os.waitpid(worker.pid, options)
        if not pid:
            return
        worker.connection.close()
        self.workers.remove(worker)
        if worker.running is not None:
            item = self.session.items[worker.running]
            reason = f"the worker died in this test: exit code {os.waitstatus_to_exitcode(status)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
            item.ihook.pytest_runtest_logreport(report=report)
        if worker.unit:
            self.units.appendleft(worker.unit)
        if self.units:
            self.start()

    def stop(self) -> None:
        """Interrupt the workers, and end those that do not stop."""
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGINT)
            worker.connection.close()
        for worker in self.workers:
            _end(worker.pid)


MADV_COLLAPSE = 25  # Linux 6.1 and later
HUGE_PAGE = 2 << 20


def use_huge_pages() -> None:
    """Keep the memory of this process in pages of 2 MiB, where the system can. A fork copies the table of pages: with
    small ones that takes 70 ms of a core for a worker, and again for each process that its tests fork."""
    try:
        advise = ctypes.CDLL(None).madvise
        lines = open("/proc/self/maps").read().splitlines()  # noqa: SIM115
    except (OSError, AttributeError):
        return
    for fields in map(str.split, lines):
        if fields[1].startswith("rw-p") and (len(fields) == 5 or fields[5] == "[heap]"):
            begin, end = (int(word, 16) for word in fields[0].split("-"))
            begin, end = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if begin < end:
                advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_COLLAPSE)


def _end(pid: int) -> None:
    """Wait for a process, and kill it when that takes too long."""
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, if there are any to be."""
    count: int = session.config.option.workers
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    marks = [item.get_closest_marker("group") for item in session.items]
    slow = {position for position, item in enumerate(session.items) if item.get_closest_marker("slow")}
    pool = Pool(session, plan((mark.args[0] if mark else None for mark in marks), slow))
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    # What is frozen is neither copied nor looked through by the collections of the workers.
    gc.collect()
    gc.freeze()
    use_huge_pages()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pool.run(count)
    finally:
        pool.stop()
        gc.unfreeze()
    return True
