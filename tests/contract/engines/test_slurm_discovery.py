"""What the nodes of a Slurm cluster have answered when they were probed."""

import stat
import sys
from pathlib import Path

import pytest

from mlbench_cli.agent.channel import Channel, Target
from mlbench_cli.engines.machines.details import SlurmDetails
from mlbench_cli.engines.slurm.discovery import check_probes, discover_cluster, parse_associations, parse_probes
from mlbench_cli.errors import UsageError

DETAILS = SlurmDetails(folder="/shared")


def test_a_folder_that_a_node_does_not_see_is_refused_with_its_name() -> None:
    probes = parse_probes("n1|abc|3.11.7|2.5.0\nn2||3.11.7|2.5.0\nsrun: noise\n", "abc")
    with pytest.raises(UsageError, match="n2 cannot read") as caught:
        check_probes(probes, DETAILS)
    assert "--shared" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n1|abc|3.11.7|2.5.0\nn2|abc|3.12.1|2.5.0\n", "versions of Python: n1 3.11.7, n2 3.12.1"),
        ("n1|abc|3.11.7|2.5.0\nn2|abc|3.11.7|\n", "versions of torch: n1 2.5.0, n2 none"),
        ("n1|abc||\nn2|abc|3.11.7|\n", "cannot be run on n1"),
    ],
)
def test_nodes_that_differ_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_probes(parse_probes(text, "abc"), DETAILS)


def test_accounts_have_their_qos() -> None:
    assert parse_associations("a|normal,long\na|debug\nb|\n") == {"a": {"normal", "long", "debug"}, "b": set()}


@pytest.mark.parametrize(("version", "words"), [("slurm 20.11.9", "needs 21.08"), ("", "no Slurm")])
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
