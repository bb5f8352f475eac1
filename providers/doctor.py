"""What `mlbench doctor PROVIDER` asks of a cloud before anything is made in it: reads only, each with its deadline."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import import_module, metadata
from typing import Any, TypeVar

from mlbench_cli.errors import MlbenchError, UsageError, did_you_mean
from mlbench_cli.extras import install_hint

# The module of each provider that can be asked, with `checks(project, location) -> Iterator[Check]`.
DOCTORS = {"gke": "providers.gke.doctor", "eks": "providers.eks.doctor"}
MOST_SKEW = 60.0  # seconds; clouds refuse signatures from five minutes on

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Check:
    """One line of the report. `state`: ok | missing (something optional is not there) | failed (it will not work).

    `exit_code` is that of the error behind a failure; `hint` the next command.
    """

    what: str
    state: str
    found: str
    hint: str | None = None
    exit_code: int = UsageError.exit_code


def checks(provider: str, project: str | None, location: str | None) -> Iterator[Check]:
    """All that can be known of a provider's cloud. Raises UsageError for a provider that has none."""
    from providers.registry import ALIASES

    name = ALIASES.get(provider, provider)
    if name not in DOCTORS:
        near = did_you_mean(provider, [*DOCTORS, *ALIASES])
        raise UsageError(f'There is nothing to ask of "{provider}", only of {", ".join(DOCTORS)}.{near}')
    yield from import_module(DOCTORS[name]).checks(project, location)


class Asking:
    """Asks one thing after the other; a refusal becomes a line of the report."""

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self.failed: Check | None = None  # the last question's, where it was refused

    def __call__(self, what: str, question: Callable[[], Answer], *, optional: bool = False) -> Answer | None:
        """The answer; or None, with the refusal in `failed`."""
        self.failed = None
        try:
            return question()
        except MlbenchError as error:
            state = "missing" if optional else "failed"
            self.failed = Check(self.named(what), state, error.message, error.hint, error.exit_code)
        return None

    def line(self, what: str, found: str, hint: str | None = None, *, missing: bool = False) -> Check:
        return Check(self.named(what), "missing" if missing else "ok", found, hint)

    def named(self, what: str) -> str:
        return f"{self._provider} {what}"


def library(asking: Asking, package: str, floor: str, extra: str) -> Check:
    """Whether the cloud's library is installed, and not older than pyproject.toml wants it."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(asking.named("library"), "failed", f"no {package}", install_hint(extra))
    if _numbers(version) < _numbers(floor):
        found = f"{package} {version}, older than {floor}"
        return Check(asking.named("library"), "failed", found, install_hint(extra, upgrade=True))
    return asking.line("library", f"{package} {version}")


def program(asking: Asking, name: str, use: str) -> Check:
    """A program that only hints name: nothing here runs it."""
    import shutil

    path = shutil.which(name)
    found, hint = (path, None) if path else ("not on PATH", f"Not needed by mlbench; {use}.")
    return asking.line(name, found, hint, missing=path is None)


def clock(asking: Asking, date: str | None, asked: float) -> Check:
    """Whether this machine's clock, which showed `asked` when the answer came, is right by the cloud's header Date."""
    try:
        ahead = asked - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return asking.line("clock", "the cloud does not tell the time")
    if abs(ahead) <= MOST_SKEW:
        return asking.line("clock", "right")
    which = "ahead of" if ahead > 0 else "behind"
    hint = "Set the clock: signatures from five minutes off on are refused. timedatectl set-ntp true"
    return Check(asking.named("clock"), "failed", f"{abs(ahead):.0f} s {which} the cloud's", hint, exit_code=3)


def prices(asking: Asking, provider: str, region: str) -> Check:
    """Of how many things the price is known in a region, and since when."""
    from providers.pricing import own_file, table

    found = asking("prices", lambda: table(provider))
    if found is None:
        assert asking.failed is not None
        return asking.failed
    known = found.known(region)
    hint = f"What is not known is shown as unknown; a table of your own: {own_file()}"
    return asking.line("prices", f"{known} known in {region}; {found.source}", hint, missing=known <= 1)


def ours(asking: Asking, question: Callable[[], list[Any]]) -> Check:
    """The clusters that bear our marks: forgotten ones cost money."""
    found = asking("clusters", question)
    if found is None:
        assert asking.failed is not None
        return asking.failed
    late = [item.name for item in found if item.details.get("expires", float("inf")) < time.time()]
    half = [item.name for item in found if item.state == "failed"]
    told = f"{len(found)} of ours" + (f": {', '.join(item.name for item in found)}" if found else "")
    if late or half:
        hint = f"mlbench gc{' --expired' if not half else ''}   removes {', '.join(dict.fromkeys([*late, *half]))}"
        return asking.line("clusters", told, hint, missing=True)
    return asking.line("clusters", told)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
