"""A plugin of pytest: which tests may be skipped, and where. With MLBENCH_SKIPS=strict, as in `make test`, others fail.

Otherwise a missing program or package would take tests away, and the suite would still pass.
"""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from mlbench_cli.agent.storage import try_to_slow


def is_root() -> bool:
    return os.geteuid() == 0


@functools.cache
def is_unprivileged() -> bool:
    """Whether this process may not make namespaces, networks and mounts: an ordinary user, or root in a container."""
    unshare = shutil.which("unshare")
    if not is_root() or unshare is None:
        return True
    return subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode != 0


@functools.cache
def has_no_control_groups() -> bool:
    """Whether no control group with a memory limit can be made."""
    if is_unprivileged():
        return True
    places = [path for path in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory") if os.access(path, os.W_OK)]
    for place in places:
        folder = f"{place}/mlbench-skips-{os.getpid()}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            if any(os.path.exists(f"{folder}/{name}") for name in ("memory.max", "memory.limit_in_bytes")):
                return False
        finally:
            os.rmdir(folder)
    return True


DISK = "/var/tmp"  # is hardly ever in memory, unlike the temporary folder


def has_no_disk_limits() -> bool:
    """Whether this process may not limit how fast a disk is for others."""
    try:
        try_to_slow(DISK)
    except OSError:
        return True
    return False


def has_no_gpu() -> bool:
    return shutil.which("nvidia-smi") is None and not os.path.exists("/dev/kfd")


def is_workstation() -> bool:
    """Whether nobody has promised to install the programs that tests need besides Python: CI does."""
    return not os.environ.get("CI")


def anywhere() -> bool:
    return True


@dataclass(frozen=True)
class AllowedSkip:
    """Tests below `tests` may be skipped for a `reason` (a regular expression) where `where` holds."""

    tests: str
    reason: str
    where: Callable[[], bool]


ALLOWED = (
    AllowedSkip("tests/contract/task_images/cifar10_resnet20_tensorflow/", "TensorFlow", anywhere),  # 1.2 GB
    AllowedSkip("tests/contract/task_images/test_jax.py", "JAX", anywhere),  # 0.4 GB
    AllowedSkip("tests/contract/task_images/allreduce/test_tensorflow.py", "TensorFlow", anywhere),
    AllowedSkip("tests/unit/task_images/harness/test_entry.py", "this machine has a GPU", anywhere),
    AllowedSkip("tests/gpu/", "", has_no_gpu),
    AllowedSkip("tests/contract/engines/local/test_faults.py", "storage cannot be slowed", has_no_disk_limits),
    AllowedSkip("tests/contract/server/test_chart.py", "needs helm", anywhere),
    AllowedSkip("tests/contract/server/", "axe-core is not installed", is_workstation),
    AllowedSkip("tests/", "one CPU cannot be shared", anywhere),
    AllowedSkip("tests/", "root may write everywhere", is_root),
    AllowedSkip("tests/contract/engines/", "needs root|only root can", is_unprivileged),
    AllowedSkip("tests/contract/engines/", "control group", has_no_control_groups),
    AllowedSkip("tests/unit/task_images/harness/test_cores.py", "control groups", has_no_control_groups),
    AllowedSkip("tests/contract/engines/local/test_shaped_network.py", "", is_unprivileged),
    AllowedSkip("tests/contract/engines/local/test_shaped_network.py", "every user may start", is_workstation),
    AllowedSkip("tests/contract/engines/kubernetes/test_network.py", "", is_unprivileged),
    AllowedSkip("tests/contract/simulator/test_real_steps.py", "", is_unprivileged),
    AllowedSkip("tests/contract/task_images/comm/test_wire_bytes.py", "", is_unprivileged),
    AllowedSkip("tests/contract/server/", "chromium", is_workstation),
    AllowedSkip("tests/contract/results/test_site.py", "chromium", is_workstation),
    AllowedSkip("tests/contract/results/test_site.py", "npm package", anywhere),
    AllowedSkip("tests/contract/server/test_original_client.py", "cannot be installed", is_workstation),
    AllowedSkip("tests/contract/test_ci_files.py", "needs (shellcheck|actionlint)", is_workstation),
)


def list_new_skips(skipped: Iterable[tuple[str, str]], allowed: Iterable[AllowedSkip] = ALLOWED) -> list[str]:
    """A line for each skip, given as test and reason, that is not allowed here."""
    allowed = list(allowed)
    return sorted(
        f"{test}: {reason}"
        for test, reason in skipped
        if not any(test.startswith(one.tests) and re.search(one.reason, reason) and one.where() for one in allowed)
    )


def _reason(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def _new_skips(config: pytest.Config) -> list[str]:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("MLBENCH_SKIPS") != "strict":
        return []
    return list_new_skips((report.nodeid, _reason(report)) for report in reporter.stats.get("skipped", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session that has skipped what may not be skipped here."""
    if exitstatus == pytest.ExitCode.OK and _new_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that fail the session."""
    if lines := _new_skips(terminalreporter.config):
        terminalreporter.section("skipped, and not allowed here (tests/skips.py)")
        for line in lines:
            terminalreporter.line(line)
