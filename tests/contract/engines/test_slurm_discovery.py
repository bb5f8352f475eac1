"""What the nodes of a Slurm cluster have answered when they were probed."""

import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.engines.machines.details import PartitionRecord, SlurmDetails
from mlbench_cli.engines.slurm.discovery import (
    SlurmFacts,
    check_choice,
    check_probes,
    discover_cluster,
    parse_nodes,
    parse_probes,
)
from mlbench_cli.errors import NotFoundError, UsageError
from tests.contract.engines.labs import install_commands

DETAILS = SlurmDetails(folder="/shared")


def answers(*lines: str) -> str:
    return "".join(f"\nmlbench-probe|{line}\n" for line in lines)


def test_a_folder_that_a_node_does_not_see_is_refused_with_its_name() -> None:
    probes = parse_probes(answers("n1|abc|3.11.7|2.5.0|torch", "n2||3.11.7|2.5.0|torch"), "abc")
    with pytest.raises(UsageError, match="n2 cannot read") as caught:
        check_probes(probes, DETAILS)
    assert "--shared" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("n1|abc|3.11.7|2.5.0|torch", "n2|abc|3.12.1|2.5.0|torch"), "versions of Python: n1 3.11.7, n2 3.12.1"),
        (("n1|abc|3.11.7|2.5.0|torch", "n2|abc|3.11.7||"), "versions of torch: n1 2.5.0, n2 none"),
        (("n1|abc|||", "n2|abc|3.11.7||"), "cannot be run on n1"),
    ],
)
def test_nodes_that_differ_are_refused(lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_probes(parse_probes(answers(*lines), "abc"), DETAILS)


class Login:
    """A login node on which the user has two accounts."""

    target = Target("login")

    def call(self, do: str, argv: list[str], **options: object) -> dict[str, object]:
        assert do == "run"
        return {"code": 0, "out": {"id": "me\n", "sacctmgr": "a|normal,long\na|debug\nb|high\n"}[argv[0]], "err": ""}


@pytest.mark.parametrize(
    ("account", "qos", "refusal"),
    [
        ("A", "Long", None),
        ("a", "debug", None),
        (None, "high", None),
        ("b", "long", 'cannot use the QOS "long", only high'),
        ("c", None, 'no account "c" on this cluster, only a, b'),
    ],
)
def test_an_account_and_its_qos_are_taken_as_slurm_takes_them(
    account: str | None, qos: str | None, refusal: str | None
) -> None:
    partition = PartitionRecord(max_seconds=None, nodes=1, gpus_per_node=0, default=True)
    host = {"writable": True, "free_bytes": 1 << 40}
    facts = SlurmFacts("23.11", {"all": partition}, 30, 300, True, None, host)
    with nullcontext() if refusal is None else pytest.raises(NotFoundError, match=refusal):
        check_choice(cast(Channel, Login()), facts, replace(DETAILS, slurm_account=account, qos=qos))


@pytest.mark.parametrize(("constraint", "idle"), [(None, 6), ("a100&ib", 2), ("a100|ib", 6), ("[a100*2&ib]", 6)])
def test_only_nodes_with_the_features_of_the_constraint_count(constraint: str | None, idle: int) -> None:
    assert parse_nodes("2|idle|n[1-2]|a100,ib\n4|idle|n[3-6]|a100\n", constraint).idle == idle


@pytest.mark.parametrize(("version", "words"), [("slurm-wlm 20.11.9", "needs 21.08"), ("", "no Slurm")])
def test_an_old_slurm_or_none_is_refused(
    version: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    channel = Channel(Target(None, sys.executable))
    with pytest.raises(UsageError, match=words):
        discover_cluster(channel, "~/x")
    channel.close()


@pytest.mark.slow
def test_nodes_that_are_drained_or_powered_down_are_counted_and_never_started(tmp_path: Path) -> None:
    """Each node that a probe wakes is paid for. Those of other partitions do not count."""
    commands = install_commands(tmp_path)
    nodes = [
        {"names": "n1", "count": 1, "state": "idle", "partition": "debug"},
        {"names": "n2", "count": 1, "state": "drained", "partition": "debug"},
        {"names": "dy[1-8]", "count": 8, "state": "idle~", "partition": "debug"},
        {"names": "off[1-2]", "count": 2, "state": "powered_down", "partition": "debug"},
        {"names": "g[1-4]", "count": 4, "state": "idle", "partition": "gpu"},
        {"names": "z[1-3]", "count": 3, "state": "idle~", "partition": "asleep"},
    ]
    (tmp_path / "slurm" / "nodes.json").write_text(json.dumps(nodes))
    environment = {**os.environ, **commands, "MLBENCH_HOME": str(tmp_path / "home")}

    def mlbench(*words: str) -> "subprocess.CompletedProcess[str]":
        tool = Path(sys.executable).with_name("mlbench")
        return subprocess.run([tool, *words], env=environment, capture_output=True, text=True, check=False)

    where = ("--shared", str(tmp_path / "shared"), "--python", sys.executable)
    done = mlbench("attach-slurm", "awake", *where)
    assert done.returncode == 0, done.stderr
    assert "11 nodes were not probed (1 is drained, 10 are powered down)" in done.stderr
    done = mlbench("doctor", "slurm")
    assert "1 probed; 1 is drained, 10 are powered down" in done.stdout, done.stdout + done.stderr
    done = mlbench("attach-slurm", "asleep", "--partition", "asleep", *where)
    assert done.returncode == 0, done.stderr
    assert "No node of the partition is idle (3 are powered down), so none was probed" in done.stderr
    assert not (tmp_path / "slurm" / "woken").exists()
