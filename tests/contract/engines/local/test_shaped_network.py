"""Networks of a given rate and delay between the workers of a local run: made, proved, refused, gone."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.network.namespaces import ShapingError
from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.engines.local.engine import read_state
from mlbench_cli.errors import CapacityError
from mlbench_cli.model.network import parse_network
from mlbench_cli.model.run import Ending
from tests.contract.local_runs import Lab, python, until

ROOT = Path(__file__).parents[4]
SLOW = "10mbit,50ms"  # slow enough for a machine that is busy with other tests: a tenth of its round trip is 10 ms


@functools.cache
def find_obstacle() -> str | None:
    """Why this machine cannot make such networks, None if it can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    try:
        ShapedNetwork(parse_network(SLOW), 2).close()
    except ShapingError as error:
        if "ended at once" in str(error):  # a defect of the program, not a limit of this machine
            raise
        return str(error)
    return None


@pytest.fixture(autouse=True)
def possible() -> None:
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[ShapedNetwork]:
    monkeypatch.setattr("mlbench_cli.agent.network.shaped.ATTEMPTS", 10)
    made = ShapedNetwork(parse_network(SLOW), 3)
    yield made
    made.close()


def test_nothing_of_it_is_left_behind(network: ShapedNetwork) -> None:
    hub = network._hub.pid
    own = {os.readlink(f"/proc/{pid}/ns/net") for pid in (hub, *children_of(hub))} - {os.readlink("/proc/self/ns/net")}
    assert own
    network.close()
    assert not Path(f"/proc/{hub}").exists()
    until(lambda: not own & namespaces_of_others())  # its children die with it, each in its time
    assert not [name for name in os.listdir("/sys/class/net") if name in ("h0", "h1", "hub")]


def children_of(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def namespaces_of_others() -> set[str]:
    """Network namespaces of all processes, besides this one's."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found - {os.readlink("/proc/self/ns/net")}


def test_it_dies_with_whoever_made_it() -> None:
    code = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]);"
        "from mlbench_cli.agent.network.shaped import ShapedNetwork\n"
        "from mlbench_cli.model.network import parse_network\n"
        f"made = ShapedNetwork(parse_network({SLOW!r}), 2); print(made._hub.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(ROOT)], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        hub = int(maker.stdout.readline())
        assert Path(f"/proc/{hub}").exists()
        maker.kill()
    until(lambda: not Path(f"/proc/{hub}").exists())


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """One that every user may read. pytest takes its own folders away from others whenever it starts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in (folder, *folder.parents):
            if each.is_relative_to(tempfile.gettempdir()):
                each.chmod(each.stat().st_mode | 0o055)
        yield folder


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_can_make_it_too(public_folder: Path) -> None:
    interpreter = shutil.which("python3", path="/usr/bin:/bin")
    if interpreter is None:
        pytest.skip("no interpreter that every user may start")
    for package in ("mlbench_cli", "task_images"):
        shutil.copytree(ROOT / package, public_folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import json, os, sys; sys.path.insert(0, sys.argv[1]);"
        "from mlbench_cli.agent.network.namespaces import ShapingError\n"
        "from mlbench_cli.agent.network.shaped import ShapedNetwork\n"
        "from mlbench_cli.model.network import parse_network\n"
        "try: made = ShapedNetwork(parse_network(sys.argv[2]), 2)\n"
        "except ShapingError as error: sys.exit(f'cannot: {error}')\n"
        "made.verify()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    made.enter_worker(1); print(os.getuid(), os.listdir('/sys/class/net') and '', flush=True); os._exit(0)\n"
        "os.waitpid(child, 0); print(json.dumps(made.setup)); made.close()\n"
    )
    words = [interpreter, "-c", code, str(public_folder), SLOW]
    person: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
    for _ in range(5):  # tests beside this one may take the switch's CPU
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=public_folder, **person)
        if done.returncode == 0:
            break
    if done.stderr.startswith("cannot: "):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    identity, setup = done.stdout.splitlines()
    assert identity.split()[0] == "65534"  # the ranks are the user again, without rights over the network
    assert json.loads(setup)["user_namespace"] is True


def test_a_system_that_lets_nobody_make_namespaces_is_the_reason() -> None:
    """As in Docker's default profile, or with AppArmor's rule: here by the kernel's own limit."""
    code = (
        "import ctypes, os, sys; sys.path.insert(0, sys.argv[1])\n"
        "if ctypes.CDLL(None).unshare(0x10000000): sys.exit('no user namespace can be made here at all')\n"
        "user, group = sys.argv[2:]\n"
        "def write(name, text):\n"
        "    with open(name, 'w') as file: file.write(text)\n"
        "write('/proc/self/setgroups', 'deny')\n"
        "write('/proc/self/uid_map', f'1000 {user} 1'); write('/proc/self/gid_map', f'1000 {group} 1')\n"
        "write('/proc/sys/user/max_user_namespaces', '0')\n"
        "from mlbench_cli.agent.network.namespaces import ShapingError\n"
        "from mlbench_cli.agent.network.shaped import ShapedNetwork\n"
        "from mlbench_cli.model.network import parse_network\n"
        "try: ShapedNetwork(parse_network('50mbit'), 2)\n"
        "except ShapingError as error: print(error)\n"
    )
    words = [sys.executable, "-c", code, str(ROOT), str(os.geteuid()), str(os.getegid())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if done.stderr.startswith("no user namespace"):
        pytest.skip(done.stderr)
    assert "a user namespace, which an ordinary user needs for it, cannot be created: " in done.stdout, done.stderr


def test_a_run_has_the_network_and_its_archive_the_proof(lab: Lab) -> None:
    code = (
        "import json, os, socket; print(json.dumps([sorted(name for _, name in socket.if_nameindex()),"
        "os.environ['MASTER_ADDR'], os.environ['MLBENCH_HOSTS'],"
        "os.environ['GLOO_SOCKET_IFNAME'], '{hosts}']), flush=True)"
    )
    run = lab.start(python(code), workers=2, processes_per_worker=2, network=SLOW)
    assert lab.end(run).ended == Ending.EXITED
    hosts = "10.77.0.1,10.77.0.2"
    for rank in range(4):
        assert json.loads(lab.log(run, rank)) == [["eth0", "lo"], "10.77.0.1", hosts, "eth0", hosts]
    document = json.loads((run.folder / "shaping.json").read_text())
    assert (document["asked"], [probe["stage"] for probe in document["probes"]]) == (SLOW, ["before", "after"])
    assert document["task"]["sent_bytes"] is not None


@pytest.mark.nightly
def test_a_network_that_cannot_be_had_never_starts_the_run(lab: Lab) -> None:
    run = lab.record(python("print('started')"), workers=2, network="100tbit,1ms")
    with pytest.raises(
        CapacityError, match=r"cannot be created on this machine: requested 100tbit,1ms, but it carries"
    ):
        lab.engine.submit(run, lab.engine.render(run.spec))
    last = lab.end(run)
    assert last.ended == Ending.NEVER_STARTED
    assert [finding.code for finding in last.findings][:1] == ["network_not_as_asked"]
    assert not (run.folder / "logs" / "rank-0.log").exists()


def test_a_single_worker_needs_no_network(lab: Lab) -> None:
    run = lab.start(python("import os; print(os.environ['MASTER_ADDR'])"), network="100tbit")
    assert lab.end(run).ended == Ending.EXITED
    assert lab.log(run) == b"127.0.0.1\n"
    assert not (run.folder / "shaping.json").exists()


@pytest.mark.slow
def test_a_run_whose_network_breaks_fails_with_the_reason(lab: Lab) -> None:
    run = lab.start(("sleep", "600"), workers=2, network=SLOW)
    state = read_state(run)
    assert state is not None
    children = [int(pid) for pid in Path(f"/proc/{state['pid']}/task/{state['pid']}/children").read_text().split()]
    (hub,) = (pid for pid in children if b"network.hub" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(hub, signal.SIGKILL)
    last = lab.end(run)
    assert last.ended == Ending.FAILED
    assert "network_not_as_asked" in [finding.code for finding in last.findings]
    assert time.time() - last.time < 600
