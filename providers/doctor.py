"""Checks of a cloud before anything is created in it: `mlbench doctor PROVIDER`. Reads only, each with a deadline."""

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import MlbenchError, TaskFailedError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster


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


MAX_CLOCK_SKEW = 60.0  # seconds; clouds refuse signatures that are five minutes off

Answer = TypeVar("Answer")


def policy_file(provider: str) -> Path:
    """The role or policy of a cloud with all that mlbench's commands need there."""
    return Path(__file__).with_name(provider) / "policy.json"


def load_policy(provider: str) -> Any:
    """The content of `policy_file`. Tests compare it with the requests that commands make."""
    return json.loads(policy_file(provider).read_text("utf-8"))


class Checklist:
    """Makes calls one after the other and turns each error into a line of the report."""

    def __init__(self, provider: str) -> None:
        self._provider = provider

    def ask(
        self, what: str, question: Callable[[], Answer], *, optional: bool = False
    ) -> Generator[Check, None, Answer | None]:
        """The result of the call; None, after the line of its error, if it failed."""
        try:
            return question()
        except MlbenchError as error:
            state = "missing" if optional else "failed"
            yield Check(self.label(what), state, error.message, error.hint, 0 if optional else error.exit_code)
        return None

    def result(
        self, what: str, found: str, hint: str | None = None, *, missing: bool = False, optional: bool = False
    ) -> Check:
        """A line of the report: "ok" or "missing". What is `optional`, such as a quota for one kind of GPU, leaves
        the exit code as it is."""
        code = 0 if optional or not missing else TaskFailedError.exit_code
        return Check(self.label(what), "missing" if missing else "ok", found, hint, code)

    def rights(self, denied: Sequence[str], granted: str, lacking: str) -> Check:
        """The line about rights: `granted` if none is denied, else those that are, after the words `lacking`."""
        if not denied:
            return self.result("rights", granted)
        listed = ", ".join(denied[:10]) + (f" and {len(denied) - 10} more" if len(denied) > 10 else "")
        hint = f"The role to ask an administrator for: {policy_file(self._provider)}"
        return self.result("rights", f"{lacking} {listed}", hint, missing=True)

    def label(self, what: str) -> str:
        """The name of a check, with the provider before it: "gke quota"."""
        return f"{self._provider} {what}"


def check_library(checklist: Checklist, package: str, floor: str, extra: str) -> Check:
    """Check that the cloud's library is installed and not older than pyproject.toml requires."""
    label = checklist.label("library")
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(label, "failed", f"no {package}", install_hint(extra))
    if _numbers(version) < _numbers(floor):
        return Check(label, "failed", f"{package} {version}, older than {floor}", install_hint(extra, upgrade=True))
    return checklist.result("library", f"{package} {version}")


def check_program(checklist: Checklist, name: str, use: str) -> Check:
    """Look for a program that only hints mention: mlbench does not run it."""
    import shutil

    path = shutil.which(name)
    found, hint = (path, None) if path else ("not on PATH", f"Not needed by mlbench; {use}.")
    return checklist.result(name, found, hint, missing=path is None, optional=True)


def check_clock(checklist: Checklist, date: str | None, asked: float) -> Check:
    """Compare this machine's clock, which showed `asked` when the answer came, with the cloud's header Date."""
    try:
        ahead = asked - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return checklist.result("clock", "the cloud sent no date")
    if abs(ahead) <= MAX_CLOCK_SKEW:
        return checklist.result("clock", "right")
    which = "ahead of" if ahead > 0 else "behind"
    hint = "Set the clock (timedatectl set-ntp true): the cloud rejects signatures that are five minutes off."
    return Check(checklist.label("clock"), "failed", f"{abs(ahead):.0f} s {which} the cloud's", hint, exit_code=3)


def check_clusters(checklist: Checklist, question: Callable[[], list[Cluster]]) -> Iterator[Check]:
    """List the clusters that bear our tags: forgotten ones cost money."""
    found = yield from checklist.ask("clusters", question)
    if found is None:
        return
    late = [item.name for item in found if (ClusterDetails.of(item).expires or float("inf")) < time.time()]
    half = [item.name for item in found if item.state == "failed"]
    summary = f"{len(found)} of ours" + (f": {', '.join(item.name for item in found)}" if found else "")
    if late or half:
        hint = f"mlbench gc{' --expired' if not half else ''}   removes {', '.join(dict.fromkeys([*late, *half]))}"
        yield checklist.result("clusters", summary, hint, missing=True)
    else:
        yield checklist.result("clusters", summary)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
