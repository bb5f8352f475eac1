"""Releases of Google's NCCL plugins by branch of NVIDIA's driver, for clusters and runs.

The plugin, the program that runs beside the ranks, and the driver must match, so they are pinned together. Sources:
release notes of GoogleCloudPlatform/container-engine-accelerators (gpudirect-tcpx, gpudirect-tcpxo,
gpudirect-rdma) and public logs of A3 Mega with the branches 580 and 595, as of 2026-11; docs/development.
"""

from dataclasses import dataclass

REPOSITORY = "us-docker.pkg.dev/gce-ai-infra"


@dataclass(frozen=True)
class Release:
    """Images for machines whose driver is of `branch`, e.g. 580. `program` runs beside the ranks; None: none does."""

    branch: int
    plugin: str
    program: str | None = None


def _release(branch: int, family: str, plugin: str, program: str | None = None) -> Release:
    beside = f"{REPOSITORY}/{family}/tcpgpudmarxd-dev:{program}" if program else None
    return Release(branch, f"{REPOSITORY}/{family}/{plugin}", beside)


# By kind of network (`providers/gke/options.py`), oldest branch first. TCPX and TCPXO plugins have the same name.
RELEASES: dict[str, tuple[Release, ...]] = {
    "tcpx": (_release(580, "gpudirect-tcpx", "nccl-plugin-gpudirecttcpx-dev:v3.1.12", "v2.0.12"),),
    "tcpxo": (
        _release(580, "gpudirect-tcpxo", "nccl-plugin-gpudirecttcpx-dev:v1.0.16", "v1.0.22"),
        _release(595, "gpudirect-tcpxo", "nccl-plugin-gpudirecttcpx-dev:v1.0.17", "v1.0.23"),
    ),
    "gib": (_release(580, "gpudirect-gib", "nccl-plugin-gib:v1.1.1"),),
}


def choose_release(kind: str, branch: int | None) -> Release:
    """The newest release for drivers up to `branch`; the first one for older or unknown branches."""
    first, *newer = RELEASES[kind]
    fitting = [release for release in newer if branch is not None and release.branch <= branch]
    return fitting[-1] if fitting else first


def explain_unknown_branch(kind: str, branch: int) -> str | None:
    """A warning about a driver without a known release; None if there is one."""
    known = [release.branch for release in RELEASES[kind]]
    if branch in known:
        return None
    chosen = choose_release(kind, branch)
    return (
        f"The driver of the workers is of the branch {branch}; Google's plugin for NCCL is known for "
        f"{', '.join(str(number) for number in known)}. That of {chosen.branch} is installed. If NCCL does not use it, "
        "results are labeled slow_network."
    )
