"""`attach-hosts` and `attach-slurm`: what is recorded of machines, what is told about them, and what is refused."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import channel as channels
from mlbench_cli.agent.channel import Target
from mlbench_cli.commands.attach_hosts import attach_hosts
from mlbench_cli.commands.attach_slurm import _absolute, attach_slurm
from mlbench_cli.console import Format
from mlbench_cli.engines.hosts import checks
from mlbench_cli.engines.slurm.controller import Answer
from mlbench_cli.errors import CapacityError, NotFoundError, UnreachableError, UsageError
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from tests.unit.engines.slurm.login import Login

Captured = pytest.CaptureFixture[str]
NOW = 1_767_225_600.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and the folder in which the commands run."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def details_of(name: str = "lab") -> dict[str, Any]:
    return dict(Store().cluster(name).details)


# --- hosts ------------------------------------------------------------------------------------------------------------


class Host:
    """A channel to the host m1, m2, ..., which has the address 10.0.0.1, 10.0.0.2, ..."""

    def __init__(self, target: Target, facts: dict[str, Any]) -> None:
        self.target, self.facts, self.asked, self.is_closed = target, facts, list[tuple[str, dict[str, Any]]](), False

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append((do, arguments))
        address = f"10.0.0.{str(self.target.login)[-1]}"
        answers: dict[str, dict[str, Any]] = {
            "probe": {"python": "3.11.7", "torch": "2.5.0", "gpus": 4},
            "listen": {"port": 4000},
            "connect": {"reached": True, "problem": ""},
            "hello": {
                "home": "/home/me",
                "time": NOW,
                "addresses": [{"interface": "eth0", "address": address, "mask": "255.255.255.0"}],
                "connection": f"10.0.0.9 5000 {address} 22",
                "writable": True,
                "cores": 8,
                "free_bytes": 9 << 30,
            },
        }
        return {**answers[do], **{key: value for key, value in self.facts.items() if key in answers[do]}}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Host]]:
    """Hosts whose answers have these facts; the channels that the command opens to them appear in the list."""
    monkeypatch.setattr(checks, "time", SimpleNamespace(time=lambda: NOW))

    def prepare(**facts: dict[str, Any]) -> list[Host]:
        made: list[Host] = []

        def connect(target: Target) -> Host:
            made.append(Host(target, facts.get(str(target.login).rpartition("@")[2], {})))
            return made[-1]

        monkeypatch.setattr(channels, "Channel", connect)
        return made

    return prepare


def test_hosts_are_recorded_with_their_addresses_and_chosen(
    opened: Callable[..., list[Host]], capsys: Captured
) -> None:
    made = opened(m1={"gpus": 4}, m2={"gpus": 2})
    attach_hosts("lab", "me@m1:2,m2")
    assert details_of() == {
        "hosts": [
            {"name": "m1", "login": "me@m1", "slots": 2, "address": "10.0.0.1", "interface": "eth0"},
            {"name": "m2", "login": "m2", "slots": 1, "address": "10.0.0.2", "interface": "eth0"},
        ],
        "folder": "/home/me/.mlbench",
        "python": "python3",
        "interface": "eth0",
        "env": {},
        "nodes": 2,
        "gpus_per_node": 2,
    }
    assert (Store().current_cluster.name, Store().current_cluster.provider) == ("lab", "hosts")
    assert [(host.target, host.is_closed) for host in made] == [
        (Target("me@m1", "python3", None), True),
        (Target("m2", "python3", None), True),
    ]
    assert made[1].asked[-1] == ("connect", {"address": "10.0.0.1", "port": 4000})
    printed = capsys.readouterr()
    assert printed.out == (
        "The cluster lab has 2 hosts with 3 slots, Python 3.11.7, torch 2.5.0, interface eth0; commands now use it.\n"
    )
    assert printed.err == ""


def test_options_for_hosts_are_recorded(opened: Callable[..., list[Host]], home: Path, capsys: Captured) -> None:
    (home / "envs.conf").write_text("export NCCL_DEBUG=INFO\nRANK=3\n")
    made = opened(m1={"torch": None})
    attach_hosts(
        "lab", "m1", "/opt/python", "/scratch/./mlbench/", "eth0", Path("envs.conf"), ssh_config="config"
    )  # fmt: skip
    found = details_of()
    assert (found["python"], found["folder"], found["interface"]) == ("/opt/python", "/scratch/mlbench", "eth0")
    assert (found["env"], found["ssh_config"]) == ({"NCCL_DEBUG": "INFO"}, "config")
    assert made[0].target == Target("m1", "/opt/python", "config")
    printed = capsys.readouterr()
    assert printed.out == (
        "The cluster lab has 1 host with 1 slot, Python 3.11.7, torch none, interface eth0; commands now use it.\n"
    )
    assert printed.err == "Warning: The hosts' Python has no torch, which tasks need. Use --python PATH.\n"


def test_hosts_as_a_document(opened: Callable[..., list[Host]], capsys: Captured) -> None:
    opened(m1={"time": NOW + 0.12345, "free_bytes": 1 << 30}, m2={"gpus": 0})
    attach_hosts("lab", "m1,m2", output=Format.json)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    host = {"interface": "eth0", "python": "3.11.7", "torch": "2.5.0", "cores": 8}
    assert document.pop("cluster")["details"] == details_of()
    assert document == {
        "schema_version": 1,
        "hosts": [
            {**host, "name": "m1", "address": "10.0.0.1", "clock_seconds": 0.123, "gpus": 4, "free_bytes": 1 << 30},
            {**host, "name": "m2", "address": "10.0.0.2", "clock_seconds": 0.0, "gpus": 0, "free_bytes": 9 << 30},
        ],
        "warnings": ["Little free disk space on m1."],
    }
    assert printed.err == ""


def test_hosts_whose_networks_have_different_names_have_no_common_interface(
    opened: Callable[..., list[Host]], capsys: Captured
) -> None:
    other = [{"interface": "ib0", "address": "10.0.0.2", "mask": "255.255.255.0"}]
    opened(m2={"addresses": other})
    attach_hosts("lab", "m1,m2")
    assert "interface" not in details_of()
    assert [host["interface"] for host in details_of()["hosts"]] == ["eth0", "ib0"]
    assert "interface by host; commands now use it." in capsys.readouterr().out


@pytest.mark.parametrize("place", ["list", "./list", "sub/list"])
def test_hosts_may_be_in_a_file(opened: Callable[..., list[Host]], home: Path, place: str) -> None:
    (home / "sub").mkdir()
    (home / place).write_text("m1 slots=3\nm2\n")
    opened()
    attach_hosts("lab", place)
    assert [(host["login"], host["slots"]) for host in details_of()["hosts"]] == [("m1", 3), ("m2", 1)]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"name": "Lab"}, UsageError, "cluster name"),
        ({"hosts": "no/list"}, NotFoundError, "--hosts: the file no/list does not exist."),
        ({"hosts": "m1\0/x"}, UsageError, "is not a valid host name"),
        ({"env_file": Path("none")}, NotFoundError, "--env-file: the file none does not exist."),
        ({"folder": "relative"}, UsageError, "--dir 'relative' must be absolute or start with ~/."),
        ({"folder": "~other/x"}, UsageError, "--dir '~other/x' must be absolute"),
        ({"folder": "/a:b"}, UsageError, "--dir '/a:b' must be"),
        ({"folder": "/a,b"}, UsageError, "--dir '/a,b' must be"),
        ({"folder": "/a\nb"}, UsageError, "must be absolute"),
        ({"folder": "~/a\0b"}, UsageError, "must be absolute"),
    ],
)
def test_hosts_are_not_asked_with_options_that_cannot_be_used(
    opened: Callable[..., list[Host]], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    made = opened()
    with pytest.raises(kind) as caught:
        attach_hosts(**{"name": "lab", "hosts": "m1", **options})
    assert words in str(caught.value)
    assert made == []


def test_home_folders_that_differ_need_another_folder(opened: Callable[..., list[Host]]) -> None:
    made = opened(m1={"home": "/home/me"}, m2={"home": "/export/me"})
    with pytest.raises(UsageError, match="different home folders: /export/me, /home/me") as caught:
        attach_hosts("lab", "m1,m2")
    assert caught.value.hint == "--dir DIR"
    assert [host.is_closed for host in made] == [True, True]
    assert [cluster.name for cluster in Store().clusters()] == ["local"]
    attach_hosts("lab", "m1,m2", folder="/scratch")
    assert details_of()["folder"] == "/scratch"


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        ({"writable": False}, UsageError, "Cannot create the folder /home/me/.mlbench on m2"),
        ({"reached": False, "problem": "timeout"}, UnreachableError, "m2 does not reach m1 at 10.0.0.1: timeout"),
    ],
)
def test_hosts_that_cannot_run_together_are_not_recorded(
    opened: Callable[..., list[Host]], facts: dict[str, Any], kind: type[Exception], words: str
) -> None:
    made = opened(m2=facts)
    with pytest.raises(kind, match=words):
        attach_hosts("lab", "m1,m2")
    assert [host.is_closed for host in made] == [True, True]
    assert [cluster.name for cluster in Store().clusters()] == ["local"]


def test_a_cluster_of_another_kind_keeps_its_name(opened: Callable[..., list[Host]]) -> None:
    Store().record_cluster(Cluster("lab", "slurm", details={"folder": "/kept"}))
    Store().record_cluster(Cluster("other", "hosts", details={"folder": "/old"}))
    opened()
    with pytest.raises(UsageError, match='There is already a cluster "lab" of the provider slurm') as caught:
        attach_hosts("lab", "m1")
    assert caught.value.hint == "Choose another name."
    assert details_of() == {"folder": "/kept"}
    attach_hosts("other", "m1")
    assert details_of("other")["folder"] == "/home/me/.mlbench"


# --- Slurm ------------------------------------------------------------------------------------------------------------

CONFIG = "KillWait = 5 sec\nMinJobAge = 120 sec\nAccountingStorageType = accounting_storage/"
GPU = {"max_seconds": 86400, "nodes": 3, "gpus_per_node": 8, "default": True}
CPU = {"max_seconds": None, "nodes": 2, "gpus_per_node": 0, "default": False}


class LoginNode(Login):
    """A login node with the partitions gpu (default, 3 nodes) and cpu (2 nodes), of which some nodes are idle."""

    def __init__(self, target: Target, idle: int, probed: Callable[[str], str], accounting: str) -> None:
        super().__init__(
            ("sinfo --version", Answer(0, "slurm 23.11.4\n", "")),
            ("scontrol config", Answer(0, f"{CONFIG}{accounting}\n", "")),
            ("sinfo %R|%l|%D|%G|%P", Answer(0, "gpu|1-00:00:00|3|gpu:a100:8|gpu*\ncpu|infinite|2|(null)|cpu\n", "")),
            ("srun --help", Answer(0, "  --container-image=NAME", "")),
            ("sinfo idle", Answer(0, f"{idle}\n", "")),
        )
        self.target, self.probed, self.is_closed = target, probed, False

    def _run(self, argv: Any) -> dict[str, Any]:
        answer = super()._run(argv)
        if "--job-name=mlbench-probe" in argv:
            (token,) = self.files.values()
            return {**answer, "out": self.probed(token.decode())}
        return answer

    def close(self) -> None:
        self.is_closed = True

    @property
    def probe(self) -> list[str]:
        """The command of the job that probed nodes; empty without one."""
        return next((words for words in self.commands if "--job-name=mlbench-probe" in words), [])


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[LoginNode]]:
    """A login node; the channel that the command opens to it appears in the list."""

    def prepare(
        idle: int = 3, torch: str = "2.5.0", token: str | None = None, accounting: str = "slurmdbd"
    ) -> list[LoginNode]:
        made: list[LoginNode] = []

        def probed(written: str) -> str:
            return "".join(f"n{number}|{token or written}|3.11.7|{torch}\n" for number in range(1, idle + 1))

        def connect(target: Target) -> LoginNode:
            made.append(LoginNode(target, idle, probed, accounting))
            return made[-1]

        monkeypatch.setattr(channels, "Channel", connect)
        return made

    return prepare


def test_a_slurm_cluster_is_recorded_as_it_describes_itself(
    login: Callable[..., list[LoginNode]], capsys: Captured
) -> None:
    made = login()
    attach_slurm("lab", "me@login")
    assert details_of() == {
        "login": "me@login",
        "folder": "/home/me/.mlbench",
        "python": "python3",
        "setup": "",
        "exclusive": True,
        "container": "pyxis",
        "version": "23.11.4",
        "kill_wait": 5,
        "has_accounting": True,
        "partitions": {"gpu": GPU, "cpu": CPU},
        "nodes": 3,
        "gpus_per_node": 8,
        "machine_type": "gpu",
    }
    assert (Store().current_cluster.name, Store().current_cluster.provider) == ("lab", "slurm")
    assert "--nodes=3" in made[0].probe
    assert made[0].is_closed
    printed = capsys.readouterr()
    assert printed.out == "The cluster lab is Slurm 23.11.4, partition gpu with 3 nodes; commands now use it.\n"
    assert printed.err == ""


def test_options_for_slurm_are_recorded(login: Callable[..., list[LoginNode]], home: Path, capsys: Captured) -> None:
    (home / "setup.sh").write_text("module load torch\n")
    made = login(idle=1, torch="", accounting="none")
    with pytest.raises(UsageError, match="has no accounting"):
        attach_slurm("lab", "me@login", "cpu", "physics", "long")
    made = login(idle=1, torch="")
    attach_slurm(
        *("lab", "me@login", "cpu", "physics", "long", "a100", "1@2:00", "~/shared", "/opt/python"),
        *(Path("setup.sh"), "ib0", False),
        ssh_config="config",
    )
    expected = {
        "ssh_config": "config",
        "folder": "/home/me/shared",
        "python": "/opt/python",
        "partition": "cpu",
        "slurm_account": "physics",
        "qos": "long",
        "constraint": "a100",
        "switches": "1@2:00",
        "setup": "module load torch\n",
        "interface": "ib0",
        "exclusive": False,
        "nodes": 2,
        "gpus_per_node": 0,
        "machine_type": "cpu",
    }
    assert {key: details_of()[key] for key in expected} == expected
    assert made[0].target == Target("me@login", "python3", "config")
    assert {"--partition=cpu", "--account=physics", "--qos=long", "--constraint=a100"} <= set(made[0].probe)
    printed = capsys.readouterr()
    assert printed.out == "The cluster lab is Slurm 23.11.4, partition cpu with 2 nodes; commands now use it.\n"
    assert printed.err.splitlines() == [
        "Warning: /opt/python on the nodes has no torch, which tasks need. Use --python PATH or --setup FILE.",
        "1 node was not probed (busy).",
    ]


def test_a_slurm_cluster_is_attached_without_a_probe(login: Callable[..., list[LoginNode]], capsys: Captured) -> None:
    made = login(idle=0, accounting="none")
    attach_slurm("lab", "me@login", probe=False)
    assert made[0].probe == []
    assert not details_of()["has_accounting"]
    assert capsys.readouterr().err.splitlines() == [
        "Accounting is off: the controller forgets jobs 120 s after they end. Results do not depend on it.",
        "3 nodes were not probed.",
    ]


def test_a_slurm_cluster_as_a_document(login: Callable[..., list[LoginNode]], capsys: Captured) -> None:
    login(idle=1)
    attach_slurm("lab", "me@login", output=Format.json)
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document.pop("cluster")["details"] == details_of()
    assert document == {
        "schema_version": 1,
        "nodes": [{"node": "n1", "sees_folder": True, "python": "3.11.7", "torch": "2.5.0"}],
    }
    assert printed.err == ""


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"idle": 0}, CapacityError, "No node of the partition is free, so mlbench cannot check the shared folder."),
        ({"token": "another"}, UsageError, "The folder /home/me/.mlbench is not shared: n1, n2, n3"),
    ],
)
def test_a_slurm_cluster_that_cannot_run_anything_is_not_recorded(
    login: Callable[..., list[LoginNode]], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    made = login(**options)
    with pytest.raises(kind, match=words):
        attach_slurm("lab", "me@login")
    assert made[0].is_closed
    assert [cluster.name for cluster in Store().clusters()] == ["local"]


@pytest.mark.parametrize(
    ("name", "python", "target"),
    [
        ("me@login", "/opt/python", Target("me@login", "python3", "config")),  # the Python is that of the nodes
        (None, "python3", Target(None, "python3", "config")),
        (None, sys.executable, Target(None, sys.executable, "config")),
        (None, "/only/on/the/nodes/python", Target(None, "python3")),
    ],
)
def test_the_python_that_talks_to_slurm(
    login: Callable[..., list[LoginNode]], name: str | None, python: str, target: Target
) -> None:
    made = login()
    attach_slurm("lab", name, python=python, ssh_config="config")
    assert made[0].target == target
    assert details_of()["python"] == python
    assert details_of().get("login") == name


@pytest.mark.parametrize("option", ["partition", "account", "qos", "constraint", "switches"])
@pytest.mark.parametrize("value", ["", " ", "a b", "a\tb", "a\x01b"])
def test_a_word_of_slurm_is_one_word(login: Callable[..., list[LoginNode]], option: str, value: str) -> None:
    made, given = login(), dict[str, Any]({option: value})
    with pytest.raises(UsageError, match=f"^--{option} .* is empty or contains spaces"):
        attach_slurm("lab", **given)
    assert made == []


def test_a_login_that_ssh_would_take_for_an_option_is_refused(login: Callable[..., list[LoginNode]]) -> None:
    made = login()
    with pytest.raises(UsageError, match="is not a host: write HOST or USER@HOST"):
        attach_slurm("lab", "-oProxyCommand=true")
    with pytest.raises(UsageError, match="cluster name"):
        attach_slurm("Lab", "me@login")
    assert made == []


@pytest.mark.parametrize(
    ("path", "absolute"),
    [
        ("~", "/home/me"),
        ("~/x", "/home/me/x"),
        ("~/../x/", "/home/x"),
        ("/scratch/./me", "/scratch/me"),
        ("~other/x", None),
        ("scratch", None),
        ("", None),
        ("/a:b", None),
        ("~/a,b", None),
        ("/a\nb", None),
        ("/a\0b", None),
    ],
)
def test_the_shared_folder_is_absolute(path: str, absolute: str | None) -> None:
    if absolute is not None:
        assert _absolute(path, "/home/me") == absolute == os.path.abspath(absolute)
        return
    with pytest.raises(UsageError, match="is not an absolute path without : and ,"):
        _absolute(path, "/home/me")
