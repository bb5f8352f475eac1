"""Property tests give the same verdict on every machine: the same inputs each time, and no clock decides.

With MLBENCH_TEST_INPUTS=new (`make test-nightly`) they try other inputs each time; a failure prints how to repeat it.

Runs of tests do not queue for this machine: many of them run several at once, and others may be testing here, too.
"""

import atexit
import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import NIGHTLY

# gRPC would start its threads again in each fork of a process that uses it (contract/clients.py), where they abort
# over descriptors that the fork has closed. Read when gRPC is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# A fork must not collect what it has inherited: gRPC's objects would wait for threads that it lacks, and files would
# close descriptors that have other owners by then.
os.register_at_fork(after_in_child=gc.freeze)

# Collecting 600 modules with torch makes objects and hardly any garbage: searching for it takes a fifth of that time.
gc.disable()

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


settings.load_profile("new" if NIGHTLY else "repeatable")


MEMORY, ROOM = "/dev/shm", 4 << 30  # bytes; all tests leave 0.2 GB there, of three runs


def pytest_configure(config: pytest.Config) -> None:
    """Load torch once for all workers of pytest-xdist, while they collect the tests: ranks are forked from there. And
    the double of AWS, when the first of them asks for it."""
    if config.getoption("numprocesses", None) and not config.getoption("collectonly"):
        from tests.contract.task_images.ranks import share_forks
        from tests.fakes import aws_process

        share_forks()
        aws_process.share()


def pytest_collection_finish() -> None:
    """What collecting has made stays until the end. Looking through it for garbage takes 0.7 s of a core, and each
    start of a client does that (contract/clients.py)."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Workers of pytest-xdist end without the functions of atexit. Elsewhere triton would call frozen objects leaks."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.unfreeze()
    if "tests.browser" in sys.modules:
        sys.modules["tests.browser"].close_browser()


os.environ.setdefault("MLBENCH_MACHINE_LOCK", "none")

# Before torch is imported. Workers, doubles and ranks are forks: one of a process in which OpenMP has started a team of
# threads waits for them for ever. And workers share a core.
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
