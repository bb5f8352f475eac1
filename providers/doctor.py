"""Checks of a cloud before anything is created in it: `mlbench doctor PROVIDER`. Reads only, each with a deadline."""

import json
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from email.utils import parsedate_to_datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import CredentialError, MlbenchError, TaskFailedError, UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster


class Topic(Enum):
    """What every cloud is checked for: the name of its lines in the report, and what a plan says has been checked."""

    CREDENTIALS = "credentials", "credentials"
    CLOCK = "clock", "clock"
    RIGHTS = "rights", "permissions"
    API = "API", "APIs"
    KUBERNETES = "Kubernetes", "Kubernetes versions"
    GPUS = "GPUs", "GPU types"
    QUOTA = "quota", "quotas"

    def __init__(self, label: str, summary: str) -> None:
        self.label = label
        self.summary = summary


class Check(Struct, frozen=True):
    """One line of the report. `state`: ok | missing (something optional is not there) | failed (it will not work).

    `exit_code` is that of the error behind a failure; `hint` the next command. `topic` is None for what only one cloud
    is checked for, or only this machine.
    """

    what: str
    state: str
    found: str
    hint: str | None = None
    exit_code: int = UsageError.exit_code
    topic: Topic | None = None


MAX_CLOCK_SKEW = 60.0  # seconds; clouds refuse signatures that are five minutes off

Answer = TypeVar("Answer")


def policy_file(provider: str) -> Path:
    """The role or policy of a cloud with all that mlbench's commands need there."""
    return Path(__file__).with_name(provider) / "policy.json"


def load_policy(provider: str) -> Any:
    """The content of `policy_file`. Tests compare it with the requests that commands make."""
    return json.loads(policy_file(provider).read_text("utf-8"))


class Checklist:
    """Makes calls one after the other and turns each error into a line of the report.

    A line is named by its topic, with `of` behind it if the topic has several, or by words.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider

    def ask(
        self, what: Topic | str, question: Callable[[], Answer], *, of: str = "", optional: bool = False
    ) -> Generator[Check, None, Answer | None]:
        """The result of the call; None, after the line of its error, if it failed."""
        try:
            return question()
        except MlbenchError as error:
            state, code = ("missing", 0) if optional else ("failed", error.exit_code)
            yield self._line(what, of, state, error.message, error.hint, code)
        return None

    def result(
        self,
        what: Topic | str,
        found: str,
        hint: str | None = None,
        *,
        of: str = "",
        missing: bool = False,
        optional: bool = False,
    ) -> Check:
        """A line of the report: "ok" or "missing". What is `optional`, such as a quota for one kind of GPU, leaves
        the exit code as it is."""
        code = 0 if optional or not missing else TaskFailedError.exit_code
        return self._line(what, of, "missing" if missing else "ok", found, hint, code)

    def failure(self, what: Topic | str, found: str, hint: str, exit_code: int = UsageError.exit_code) -> Check:
        """A line about what will not work."""
        return self._line(what, "", "failed", found, hint, exit_code)

    def rights(self, denied: Sequence[str], granted: str, lacking: str, note: str = "") -> Check:
        """The line about rights: `granted` if none is denied, else those that are, after the words `lacking`.

        `note` goes behind the path of the policy.
        """
        if not denied:
            return self.result(Topic.RIGHTS, granted)
        listed = ", ".join(denied[:10]) + (f" and {len(denied) - 10} more" if len(denied) > 10 else "")
        hint = f"What to ask an administrator for: {policy_file(self._provider)}{note}"
        return self.result(Topic.RIGHTS, f"{lacking} {listed}", hint, missing=True)

    def _line(self, what: Topic | str, of: str, state: str, found: str, hint: str | None, exit_code: int) -> Check:
        topic, name = (what, what.label) if isinstance(what, Topic) else (None, what)
        label = f"{self._provider} {name}{f' {of}' if of else ''}"
        return Check(label, state, found, hint, exit_code, topic)


def check_library(checklist: Checklist, package: str, floor: str, extra: str) -> Check:
    """Check that the cloud's library is installed and not older than pyproject.toml requires."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return checklist.failure("library", f"no {package}", install_hint(extra))
    if _numbers(version) < _numbers(floor):
        hint = install_hint(extra, upgrade=True)
        return checklist.failure("library", f"{package} {version}, older than {floor}", hint)
    return checklist.result("library", f"{package} {version}")


def check_program(checklist: Checklist, name: str) -> Check:
    """Look for a program that only hints mention: mlbench does not run it."""
    path = shutil.which(name)
    found, hint = (path, None) if path else ("not on PATH", "Not needed by mlbench; hints name its commands.")
    return checklist.result(name, found, hint, missing=path is None, optional=True)


def check_clock(checklist: Checklist, date: str | None, asked: float) -> Check:
    """Compare this machine's clock, which showed `asked` when the answer came, with the cloud's header Date."""
    try:
        ahead = asked - parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return checklist.result(Topic.CLOCK, "the cloud sent no date")
    if abs(ahead) <= MAX_CLOCK_SKEW:
        return checklist.result(Topic.CLOCK, "right")
    which = "ahead of" if ahead > 0 else "behind"
    hint = "Set the clock (timedatectl set-ntp true): the cloud rejects signatures that are five minutes off."
    return checklist.failure(Topic.CLOCK, f"{abs(ahead):.0f} s {which} the cloud's", hint, CredentialError.exit_code)


def check_clusters(checklist: Checklist, question: Callable[[], list[Cluster]]) -> Iterator[Check]:
    """List the clusters that bear our tags: forgotten ones cost money."""
    found = yield from checklist.ask("clusters", question)
    if found is None:
        return
    late = [item.name for item in found if (ClusterDetails.of(item).expires or float("inf")) < time.time()]
    half = [item.name for item in found if item.state == "failed"]
    summary = ", ".join(item.name for item in found) if found else "none created by mlbench"
    if late or half:
        hint = f"mlbench gc{' --expired' if not half else ''}   removes {', '.join(dict.fromkeys([*late, *half]))}"
        yield checklist.result("clusters", summary, hint, missing=True)
    else:
        yield checklist.result("clusters", summary)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
