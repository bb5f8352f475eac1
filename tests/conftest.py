"""Property tests give the same verdict on every machine: the same inputs each time, and no clock decides.

With MLBENCH_TEST_INPUTS=new (`make test-nightly`) they try other inputs each time; a failure prints how to repeat it.

Runs of tests do not queue for this machine: many of them run several at once, and others may be testing here, too.
"""

import atexit
import contextlib
import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# gRPC would start its threads again in each fork of a process that uses it (contract/clients.py), where they abort
# over descriptors that the fork has closed. Read when gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A fork must not collect what it has inherited: gRPC's objects would wait for threads that it lacks, and files would
# close descriptors that have other owners by then.
os.register_at_fork(after_in_child=gc.freeze)

# Collecting 500 modules with torch makes objects and hardly any garbage: searching for it takes a fifth of that time.
gc.disable()

pytest_plugins = ("tests.grouping", "tests.limits", "tests.skips", "tests.workers")

settings.register_profile(
    "repeatable",
    max_examples=40,  # the same ones every day
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "new", settings.get_profile("repeatable"), max_examples=100, derandomize=False, print_blob=True
)


settings.load_profile("new" if os.environ.get("MLBENCH_TEST_INPUTS") == "new" else "repeatable")


MEMORY, ROOM = "/dev/shm", 4 << 30  # bytes; all tests leave 0.2 GB there, of three runs
MANY = 2000  # tests, of which some need each of these
SHARED = (
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "kubernetes.client", "boto3", "azure.core", "jinja2"),
    *("azure.identity", "uvicorn", "starlette.applications", "mlbench_cli.commands.run", "mlbench_cli.commands.serve"),
)


@settings(max_examples=1)
@given(st.text())
def read_constants(text: str) -> None:
    """Hypothesis reads all modules of the project for values to try, which takes seconds of a core in a fresh clone."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Read them, and import what many tests need, before the workers are forked, or each of them would. From then on
    garbage is searched for as usual."""
    items = session.items if session.config.option.workers else []
    if any(getattr(getattr(item, "function", None), "is_hypothesis_test", False) for item in items):
        read_constants()
    if len(items) > MANY:
        for name in SHARED:
            with contextlib.suppress(ImportError):
                import_module(name)
    gc.enable()


os.environ.setdefault("MLBENCH_MACHINE_LOCK", "none")

# Before torch is imported. Workers, doubles and ranks are forks: one of a process in which OpenMP has started a team of
# threads waits for them for ever. And three workers share a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def keep_files_in_memory() -> None:
    """Tests flush thousands of small files and stores, and on a disk all workers wait for milliseconds each time."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    place = os.statvfs(MEMORY)
    if place.f_bavail * place.f_frsize >= ROOM and not place.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = f"{MEMORY}/tests-{getpass.getuser()}"
        os.makedirs(os.environ["TMPDIR"], exist_ok=True)
        tempfile.tempdir = None


def make_home() -> None:
    """A test that names no folder of its own must not write into the home of whoever runs the tests."""
    os.environ["MLBENCH_HOME"] = tempfile.mkdtemp(prefix="mlbench-tests-")
    atexit.register(shutil.rmtree, os.environ["MLBENCH_HOME"], ignore_errors=True)


def pytest_worker_start() -> None:
    """Give each worker a home."""
    make_home()


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test may name folders of tasks, of which later tests know nothing."""
    from mlbench_cli.tasks import catalog
    from mlbench_cli.tasks.task_sources import VARIABLE

    monkeypatch.setenv(VARIABLE, "")
    yield
    catalog.load_catalog.cache_clear()
    catalog._load_one.cache_clear()


keep_files_in_memory()
make_home()

# The programs that tests start keep what they compile, or each of them would compile the whole tool again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what stands before "&" with SIGINT ignored, and whatever the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
