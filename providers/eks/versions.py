"""The Kubernetes versions of EKS, their end of standard support, and the choice for a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from mlbench_cli.errors import CredentialError, UsageError
from providers.eks.api import Aws
from providers.pins import ends_soon


@dataclass(frozen=True)
class Version:
    """Kubernetes X.Y in EKS, with the last day of standard support `ends` (None: unknown)."""

    name: str
    ends: date | None
    is_default: bool

    def __str__(self) -> str:
        return f"{self.name} (until {self.ends})" if self.ends else self.name

    def ends_soon(self, today: date) -> bool:
        """Whether its standard support ends within two months."""
        return ends_soon(self.ends, today)


def offered_versions(aws: Aws) -> tuple[Version, ...]:
    """The versions with standard support, newest first. Raises CredentialError without permission."""
    told = aws.pages("eks", "describe_cluster_versions", "clusterVersions")
    found = [_parse(item) for item in told if item.get("versionStatus", item.get("status")) == "STANDARD_SUPPORT"]
    return tuple(sorted(found, key=lambda version: _key(version.name), reverse=True))


def choose_version(offered: Sequence[Version], today: date | None = None) -> Version | None:
    """EKS' default; the newest if the default's support ends soon; None if unknown."""
    today = today or datetime.now(UTC).date()
    default = next((version for version in offered if version.is_default), None)
    if default is not None and not default.ends_soon(today):
        return default
    lasting = [version for version in offered if not version.ends_soon(today)]
    return lasting[0] if lasting else default


def version_for(aws: Aws, wanted: str | None) -> str | None:
    """The version to request; None: EKS' choice, without permission to list versions."""
    if wanted is not None:
        return wanted
    try:
        chosen = choose_version(offered_versions(aws))
    except CredentialError:
        return None
    return None if chosen is None else chosen.name


def check_version(aws: Aws, wanted: str | None) -> list[str]:
    """Warnings about the version that a cluster will get. Raises UsageError for one without standard support."""
    today = datetime.now(UTC).date()
    try:
        offered = offered_versions(aws)
    except CredentialError as error:
        return [] if wanted is None else [f"Cannot check whether EKS has Kubernetes {wanted}: {error.message}"]
    named = ", ".join(map(str, offered))
    if wanted is None:
        chosen, default = choose_version(offered, today), next((item for item in offered if item.is_default), None)
        if chosen is None or chosen is default:
            return []
        reason = f", since standard support of EKS' default {default.name} ends on {default.ends}" if default else ""
        return [f"The cluster gets Kubernetes {chosen}{reason}."]
    found = next((version for version in offered if version.name == wanted), None)
    if found is None:
        raise UsageError(
            f"EKS does not offer Kubernetes {wanted} with standard support.",
            hint=f"It has: {named}; or remove --kubernetes-version",
        )
    if not found.ends_soon(today):
        return []
    return [
        f"Standard support of Kubernetes {found.name} on EKS ends on {found.ends}: EKS then upgrades the cluster by "
        f"itself. It has: {named}."
    ]


def _parse(item: dict[str, Any]) -> Version:
    ends = item.get("endOfStandardSupportDate")
    return Version(
        str(item["clusterVersion"]),
        ends.date() if isinstance(ends, datetime) else None,
        bool(item.get("defaultVersion")),
    )


def _key(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())
