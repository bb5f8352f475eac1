"""Versions that mlbench chooses itself, from the pins.toml beside this file."""

import tomllib
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).with_name("pins.toml")
ANY = "any"  # for every version of Kubernetes
SOON_DAYS = 60  # before its end, a version is none for a new cluster


def ends_soon(last: date | None, today: date | None = None) -> bool:
    """Whether a support whose last day is known ends within SOON_DAYS, or has ended."""
    today = today or datetime.now(UTC).date()
    return last is not None and (last - today).days <= SOON_DAYS


def list_ends() -> dict[str, date]:
    """The last days of the supports that versions were chosen for, by group and version of Kubernetes."""
    return {f"{group} {version}": day for group, days in _read()["support"].items() for version, day in days.items()}


def find_pin(group: str, part: str, kubernetes: str = ANY) -> str | None:
    """The version of a part; None if none is pinned for that Kubernetes."""
    version: str | None = _read()[group].get(kubernetes, {}).get(part)
    return version


def require_pin(group: str, part: str) -> str:
    """The version of a part that is pinned for every Kubernetes."""
    version: str = _read()[group][ANY][part]
    return version


def pinned_versions(group: str) -> list[str]:
    """The versions of Kubernetes for which the group has pins."""
    return list(_read()[group])


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(SHIPPED.read_text("utf-8"))
