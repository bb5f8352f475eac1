"""A real Slurm and real hosts with sshd on this machine (see run.sh); each test has a data folder of its own."""

import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machines.fleet import Client, Fleet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    if "MACHINES_SHARED" not in os.environ:
        pytest.skip("no Slurm and no hosts here: make e2e-machines")
    return Fleet(
        shared=Path(os.environ["MACHINES_SHARED"]) / f"tests-{uuid.uuid4().hex[:8]}",
        hosts=tuple(os.environ["MACHINES_HOSTS"].split(",")),
        ssh_config=Path(os.environ["MACHINES_SSH_CONFIG"]),
    )


@pytest.fixture
def client(fleet: Fleet, tmp_path: Path) -> Iterator[Client]:
    """A client of no cluster yet; what it has started is gone when the test ends."""
    client = Client(tmp_path / "home")
    yield client
    client.close()


@pytest.fixture
def slurm(fleet: Fleet, client: Client, tmp_path: Path) -> Client:
    client.attach = ["attach-slurm", "lab", "--shared", str(fleet.shared), "--python", sys.executable, "--no-probe"]
    client.ok(*client.attach)
    return client


@pytest.fixture
def hosts(fleet: Fleet, client: Client, tmp_path: Path) -> Client:
    """Hosts that share no folder: each sees its own one under the same path."""
    place = tmp_path / "on-hosts"
    python = write_isolating_python(tmp_path, place)
    client.attach = ["attach-hosts", "lab", "--hosts", ",".join(fleet.hosts), "--ssh-config", str(fleet.ssh_config)]
    client.attach += ["--python", str(python), "--dir", str(place)]
    client.ok(*client.attach)
    return client


def write_isolating_python(folder: Path, place: Path) -> Path:
    """A Python for the hosts, in a mount namespace with a folder of the host's own behind `place`."""
    place.mkdir()
    script = folder / "python-of-hosts"
    inner = f'mkdir -p "$1" && mount --bind "$1" {shlex.quote(str(place))} && shift && exec "$@"'
    disk = f"{shlex.quote(str(folder))}/disk-$address"
    lines = [
        "#!/bin/bash",
        f"python={shlex.quote(sys.executable)}",
        '[ -n "${MLBENCH_TEST_INSIDE:-}" ] && exec "$python" "$@"',
        "address=$(set -- $SSH_CONNECTION; echo $3)",
        f"export MLBENCH_TEST_INSIDE=1 MLBENCH_MACHINE_LOCK={shlex.quote(str(folder))}/lock-$address",
        f'exec unshare -m bash -c {shlex.quote(inner)} inside {disk} "$python" "$@"',
    ]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return script
