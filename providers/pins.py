"""Versions that mlbench chooses itself: the user's own pins.toml first, then the one beside this file."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from mlbench_cli.config import settings
from mlbench_cli.errors import UsageError

SHIPPED = Path(__file__).with_name("pins.toml")
ANY = "any"  # for every version of Kubernetes
SUPPORT = "support"
SOON_DAYS = 60  # before its end, a version is none for a new cluster


@dataclass(frozen=True)
class Pin:
    """The version of one part for a version of Kubernetes. `ends`: the last day of that Kubernetes' support, if known.

    `is_own`: from the user's own file.
    """

    group: str
    kubernetes: str
    part: str
    version: str
    ends: date | None = None
    is_own: bool = False

    def ends_soon(self, today: date | None = None) -> bool:
        """Whether the support that it is for ends within SOON_DAYS, or has ended."""
        return ends_soon(self.ends, today)


def ends_soon(last: date | None, today: date | None = None) -> bool:
    """Whether a support whose last day is known ends within SOON_DAYS, or has ended."""
    today = today or datetime.now(UTC).date()
    return last is not None and (last - today).days <= SOON_DAYS


def user_pin_file() -> Path:
    """The user's own pins.toml, whose entries go before the shipped ones."""
    return settings.config_dir() / "pins.toml"


def list_pins() -> list[Pin]:
    """All pins. Raises UsageError for a file that is malformed."""
    shipped = _read(SHIPPED)
    own = _read(user_pin_file()) if user_pin_file().exists() else {}
    ends = {group: {**days, **own.get(SUPPORT, {}).get(group, {})} for group, days in shipped[SUPPORT].items()}
    found = {key: Pin(*key, version) for key, version in _entries(shipped)}
    found |= {key: Pin(*key, version, is_own=True) for key, version in _entries(own)}
    return [
        Pin(pin.group, pin.kubernetes, pin.part, pin.version, ends.get(pin.group, {}).get(pin.kubernetes), pin.is_own)
        for pin in found.values()
    ]


def find_pin(group: str, part: str, kubernetes: str = ANY) -> str | None:
    """The version of a part; None if none is pinned for that Kubernetes."""
    key = (group, kubernetes, part)
    return next((pin.version for pin in list_pins() if (pin.group, pin.kubernetes, pin.part) == key), None)


def require_pin(group: str, part: str) -> str:
    """The version of a part that is pinned for every Kubernetes."""
    version = find_pin(group, part)
    assert version is not None, f"{SHIPPED} has no {group}.{ANY}.{part}"
    return version


def pinned_versions(group: str) -> list[str]:
    """The versions of Kubernetes for which the group has pins."""
    return list(dict.fromkeys(pin.kubernetes for pin in list_pins() if pin.group == group))


def _entries(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], str]]:
    for group, versions in document.items():
        if group != SUPPORT:
            for kubernetes, parts in versions.items():
                yield from (((group, kubernetes, part), version) for part, version in parts.items())


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The pins {path} cannot be read: {error}.", hint=f"Compare it with {SHIPPED}") from None
    for group, versions in document.items():
        kind = date if group == SUPPORT else str
        if not _is_table(versions, kind):
            raise UsageError(
                f'{path}: [{group}."X.Y"] holds {"dates" if kind is date else "versions in quotes"} by name.',
                hint=f"Compare it with {SHIPPED}",
            )
    return document


def _is_table(versions: object, kind: type) -> bool:
    """Whether it is a table of tables with values of that kind."""
    if not isinstance(versions, dict):
        return False
    return all(
        isinstance(parts, dict) and all(isinstance(value, kind) for value in parts.values())
        for parts in versions.values()
    )
