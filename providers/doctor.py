"""What `mlbench doctor PROVIDER` asks of a cloud before anything is made in it: reads only, each with its deadline."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import import_module, metadata
from typing import Any, TypeVar

from mlbench_cli.errors import MlbenchError, UsageError, did_you_mean

# The module of each provider that can be asked, with `checks(project, location) -> Iterator[Check]`.
DOCTORS = {"gke": "providers.gke.doctor", "eks": "providers.eks.doctor"}
MAX_SKEW = 60.0  # seconds; clouds refuse signatures from five minutes on

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


def run_checks(provider: str, project: str | None, location: str | None) -> Iterator[Check]:
    """All that can be known of a provider's cloud. Raises UsageError for a provider that has none."""
    from providers.registry import ALIASES

    name = ALIASES.get(provider, provider)
    if name not in DOCTORS:
        near = did_you_mean(provider, [*DOCTORS, *ALIASES])
        raise UsageError(f'There is nothing to ask of "{provider}", only of {", ".join(DOCTORS)}.{near}')
    yield from import_module(DOCTORS[name]).run_checks(project, location)


class Checklist:
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
            self.failed = Check(self.label(what), state, error.message, error.hint, error.exit_code)
        return None

    def result(self, what: str, found: str, hint: str | None = None, *, missing: bool = False) -> Check:
        return Check(self.label(what), "missing" if missing else "ok", found, hint)

    def label(self, what: str) -> str:
        return f"{self._provider} {what}"


def check_library(checklist: Checklist, package: str, floor: str, extra: str) -> Check:
    """Whether the cloud's library is installed, and not older than pyproject.toml wants it."""
    install = f"pip install 'mlbench[{extra}]'"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(checklist.label("library"), "failed", f"no {package}", install)
    if _numbers(version) < _numbers(floor):
        return Check(checklist.label("library"), "failed", f"{package} {version}, older than {floor}", f"{install} -U")
    return checklist.result("library", f"{package} {version}")


def check_program(checklist: Checklist, name: str, use: str) -> Check:
    """A program that only hints name: nothing here runs it."""
    import shutil

    path = shutil.which(name)
    found, hint = (path, None) if path else ("not on PATH", f"Not needed by mlbench; {use}.")
    return checklist.result(name, found, hint, missing=path is None)


def check_clock(checklist: Checklist, date: str | None, asked: float) -> Check:
    """Whether this machine's clock, which showed `asked` when the answer came, is right by the cloud's header Date."""
    try:
        ahead = asked - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return checklist.result("clock", "the cloud does not tell the time")
    if abs(ahead) <= MAX_SKEW:
        return checklist.result("clock", "right")
    which = "ahead of" if ahead > 0 else "behind"
    hint = "Set the clock: signatures from five minutes off on are refused. timedatectl set-ntp true"
    return Check(checklist.label("clock"), "failed", f"{abs(ahead):.0f} s {which} the cloud's", hint, exit_code=3)


def check_prices(checklist: Checklist, provider: str, region: str) -> Check:
    """Of how many things the price is known in a region, and since when."""
    from providers.pricing import load_prices, user_price_file

    found = checklist("prices", lambda: load_prices(provider))
    if found is None:
        assert checklist.failed is not None
        return checklist.failed
    known = found.count_prices(region)
    hint = f"What is not known is shown as unknown; a table of your own: {user_price_file()}"
    return checklist.result("prices", f"{known} known in {region}; {found.source}", hint, missing=known <= 1)


def check_clusters(checklist: Checklist, question: Callable[[], list[Any]]) -> Check:
    """The clusters that bear our marks: forgotten ones cost money."""
    found = checklist("clusters", question)
    if found is None:
        assert checklist.failed is not None
        return checklist.failed
    late = [item.name for item in found if item.details.get("expires", float("inf")) < time.time()]
    half = [item.name for item in found if item.state == "failed"]
    told = f"{len(found)} of ours" + (f": {', '.join(item.name for item in found)}" if found else "")
    if late or half:
        hint = f"mlbench gc{' --expired' if not half else ''}   removes {', '.join(dict.fromkeys([*late, *half]))}"
        return checklist.result("clusters", told, hint, missing=True)
    return checklist.result("clusters", told)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
