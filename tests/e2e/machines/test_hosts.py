"""What only hosts can do to a run: wrong keys, hosts that do not answer, clients that die."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.machines.fleet import Client, Fleet, ranks, supervisors, until


@pytest.fixture
def words(fleet: Fleet) -> list[str]:
    return ["attach-hosts", "bad", "--ssh-config", str(fleet.ssh_config)]


@pytest.mark.parametrize(
    ("hosts", "more", "code"),
    [
        ("m1,m1", (), 2),
        ("m1,-oProxyCommand=id", (), 2),
        ("/no/such/file", (), 4),
        ("nowhere.invalid", (), 10),
        ("m1", ("--python", "/no/python"), 2),
        ("m1", ("--dir", "relative"), 2),
        ("m1", ("--interface", "nope0"), 4),
    ],
)
def test_bad_input_is_refused_before_anything_is_kept(
    client: Client, words: list[str], hosts: str, more: tuple[str, ...], code: int
) -> None:
    done = client.run(*words, "--hosts", hosts, *more)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "bad" not in client.ok("list-clusters")


def test_a_wrong_host_key_is_refused(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "known_hosts"
    known = Path(fleet.ssh_config.parent / "known_hosts").read_text().splitlines()
    keys.write_text("\n".join([f"{known[0].split()[0]} {' '.join(known[1].split()[1:])}", *known[1:]]) + "\n")
    config = tmp_path / "config"
    config.write_text(fleet.ssh_config.read_text().replace(str(fleet.ssh_config.parent / "known_hosts"), str(keys)))
    done = client.run("attach-hosts", "bad", "--ssh-config", str(config), "--hosts", "m1,m2")
    assert done.returncode == 3
    assert "host key" in done.stderr


def test_different_versions_are_refused(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "python"
    inner = 'import sys; print(\'{"python": "3.\' + sys.argv[1] + \'", "torch": null, "gpus": 0}\')'
    script.write_text(
        "#!/bin/bash\n"
        "for word; do case $word in *import*torch*)\n"
        '  exec python3 -c "$(cat "$0.py")" "${SSH_CONNECTION//[^0-9]/}";;\n'
        'esac; done; exec python3 "$@"\n'
    )
    Path(f"{script}.py").write_text(inner)
    script.chmod(0o755)
    words = ["--ssh-config", str(fleet.ssh_config), "--hosts", "m1,m2", "--python", str(script)]
    done = client.run("attach-hosts", "bad", *words, "--dir", str(tmp_path / "d"))
    assert done.returncode == 2, done.stderr
    assert "different versions of Python" in done.stderr


def test_a_host_file_with_slots_places_workers_as_mpirun_does(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    file, env = tmp_path / "cluster4", tmp_path / "envs.conf"
    file.write_text("# two machines\nm1 slots=2\nm2 slots=2\n")
    env.write_text("export GREETING='hello you'\n")
    words = ["--ssh-config", str(fleet.ssh_config), "--dir", str(tmp_path / "d"), "--env-file", str(env)]
    client.ok("attach-hosts", "four", "--hosts", str(file), *words)
    client.ok("run", "slots", "3", "--command", "sh -c 'echo $GREETING $RANK $MLBENCH_HOSTS'", "--yes")
    folder = client.folder("slots-3")
    assert (folder / "logs/rank-2.log").read_text() == "hello you 2 m1,m1,m2\n"
    assert client.run("run", "five", "5", "--command", "true", "--yes").returncode == 5


def test_an_attached_run_ends_with_its_client_and_can_be_taken_over_before(hosts: Client) -> None:
    process = hosts.start("run", "lease", "2", "--command", "sleep 600", "--yes")
    until(lambda: len(ranks("lease-2")) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not ranks("lease-2"), seconds=150)
    until(lambda: not supervisors("lease-2"))
    done = hosts.run("wait", "lease-2")
    assert done.returncode == 7
    assert "client_lost" in (hosts.folder("lease-2") / "findings.json").read_text()
