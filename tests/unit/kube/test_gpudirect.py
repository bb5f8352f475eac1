"""Releases of Google's NCCL plugins, as their release notes pair plugin, program and driver."""

import pytest

from mlbench_cli.kube.gpudirect import choose_release, explain_unknown_branch

REPOSITORY = "us-docker.pkg.dev/gce-ai-infra"


@pytest.mark.parametrize(
    ("kind", "branch", "plugin", "program"),
    [
        (
            "tcpx",
            580,
            "gpudirect-tcpx/nccl-plugin-gpudirecttcpx-dev:v3.1.12",
            "gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12",
        ),
        (
            "tcpxo",
            580,
            "gpudirect-tcpxo/nccl-plugin-gpudirecttcpx-dev:v1.0.16",
            "gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.22",
        ),
        (
            "tcpxo",
            595,
            "gpudirect-tcpxo/nccl-plugin-gpudirecttcpx-dev:v1.0.17",
            "gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.23",
        ),
        ("gib", 580, "gpudirect-gib/nccl-plugin-gib:v1.1.1", None),
    ],
)
def test_plugin_and_program_are_of_one_release(kind: str, branch: int, plugin: str, program: str | None) -> None:
    found = choose_release(kind, branch)
    assert (found.branch, found.plugin) == (branch, f"{REPOSITORY}/{plugin}")
    assert found.program == (None if program is None else f"{REPOSITORY}/{program}")


@pytest.mark.parametrize(
    ("kind", "branch", "known", "chosen"),
    [("tcpxo", 600, "580, 595", 595), ("tcpxo", 535, "580, 595", 580), ("gib", 595, "580", 580)],
)
def test_a_driver_without_a_release_is_warned_about(kind: str, branch: int, known: str, chosen: int) -> None:
    assert explain_unknown_branch(kind, branch) == (
        f"The driver of the workers is of the branch {branch}; Google's plugin for NCCL is known for {known}. "
        f"That of {chosen} is installed. If NCCL does not use it, results are labeled slow_network."
    )
