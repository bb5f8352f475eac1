"""What only hosts can do to a run: wrong keys, hosts that do not answer, clients that die."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.machines.fleet import Client, Fleet, agents, find_processes, kill, parent_of, ranks, until


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
    inner = 'import sys; print(\'{"python": "3.\' + sys.argv[1] + \'", "torch": null, "gpus": 0, "packages": []}\')'
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


def test_a_configuration_for_tunnels_is_no_obstacle(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"{fleet.ssh_config.read_text()}\nHost *\n  SessionType none\n  StdinNull yes\n")
    words = ["--ssh-config", str(config), "--hosts", "m1,m2", "--dir", str(tmp_path / "d")]
    client.ok("attach-hosts", "tunnels", *words)
    client.ok("run", "through", "2", "--command", "sh -c 'echo $RANK'", "--yes")
    assert (client.folder("through-2") / "logs/rank-1.log").read_text() == "1\n"


def test_a_run_outlives_its_client(hosts: Client) -> None:
    process = hosts.start("run", "alone", "2", "--command", "sleep 20", "--yes")
    until(lambda: len(ranks("alone-2")) >= 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert hosts.run("wait", "alone-2").returncode == 0


def test_a_run_goes_on_while_sshd_is_away(hosts: Client, fleet: Fleet) -> None:
    """That of the first host, where the head is: the client speaks to no other, and comes back to it."""
    process = hosts.start("run", "cut", "3", "--command", "sh -c 'echo begun; sleep 12; echo end $RANK'", "--yes")
    until(lambda: len(ranks("cut-3")) >= 3)
    folder = fleet.ssh_config.parent
    daemon = int((folder / "m1.pid").read_text())
    sessions = [pid for pid in find_processes("sshd:") if parent_of(pid) == daemon]
    assert sessions
    kill([daemon, *sessions])
    until(lambda: "m1 does not answer" in hosts.run("status", "cut-3").stderr, every=1.0)
    subprocess.run(["/usr/sbin/sshd", "-f", str(folder / "m1.conf"), "-E", str(folder / "m1.log")], check=True)
    assert process.wait(150) == 0
    assert hosts.result("cut-3")["outcome"] == "completed"
    assert (hosts.folder("cut-3") / "logs/rank-1.log").read_text() == "begun\nend 1\n"


def test_a_host_that_is_away_keeps_the_run_from_starting_anywhere(hosts: Client, fleet: Fleet, tmp_path: Path) -> None:
    folder = fleet.ssh_config.parent
    daemon = int((folder / "m3.pid").read_text())
    kill([daemon])
    words = ["run", "partly", "3", "--command", "echo hello", "--yes"]
    try:
        done = hosts.run(*words)
        assert done.returncode == 10
        assert "m3 does not answer" in done.stderr
        assert not list(tmp_path.glob("disk-*/runs/partly-3"))
    finally:
        subprocess.run(["/usr/sbin/sshd", "-f", str(folder / "m3.conf"), "-E", str(folder / "m3.log")], check=True)
    hosts.ok(*words)
    assert hosts.result("partly-3")["outcome"] == "completed"


def test_a_run_on_hosts_in_use_is_refused_unless_it_shares_them(hosts: Client, tmp_path: Path) -> None:
    hosts.ok("run", "first", "2", "--command", "sleep 600", "--detach", "--yes")
    until(lambda: len(ranks("first-2")) >= 2)
    refused = hosts.run("run", "second", "1", "--command", "echo mine", "--yes")
    assert refused.returncode == 6
    assert "first-2 of user" in refused.stdout + refused.stderr
    assert not ranks("second-1")
    hosts.ok("run", "beside", "1", "--command", "echo shared", "--share-machine", "--yes")
    hosts.ok("cancel", "first-2")
    assert "--share-machine" in (hosts.folder("beside-1") / "official_result.txt").read_text()


KILL_POINTS = (
    *("m1 run.json", "m3 run.json", "m3 plan.json", "m1 nodes/0/.state/started", "m3 nodes/2/.state/started"),
    *("m1 head.json", "m2 head.json", "m3 head.json", "m3 rendezvous.json", "m3 nodes/2/logs/rank-2.log"),
)


@pytest.mark.slow
def test_a_client_killed_at_any_step_of_a_submission_loses_no_run_and_leaves_no_process(
    hosts: Client, tmp_path: Path
) -> None:
    for number, point in enumerate(KILL_POINTS):
        host, _, file = point.partition(" ")
        name = f"kill{number}-3"
        process = hosts.start(
            "run", f"kill{number}", "3", "--command", "sh -c 'sleep 1; echo end'", "--detach", "--yes"
        )
        path = tmp_path / f"disk-127.0.1.1{host[1]}" / "runs" / name / file
        other = tmp_path / f"disk-127.0.0.1{host[1]}" / "runs" / name / file
        until(partial(any_exists, path, other), every=0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        hosts.ok("wait", name)
        assert hosts.result(name)["outcome"] == "completed", point
        assert [(hosts.folder(name) / f"logs/rank-{rank}.log").read_text() for rank in range(3)] == ["end\n"] * 3
        assert until_gone(name)
    assert "nothing" in hosts.ok("gc", "hosts").lower()


def any_exists(*paths: Path) -> bool:
    return any(path.exists() for path in paths)


def until_gone(name: str) -> bool:
    return bool(until(lambda: not ranks(name) and not agents(name)))
