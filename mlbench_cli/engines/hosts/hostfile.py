"""Lists of hosts: names with commas, host files as mpirun reads them, and the environment files of older set-ups."""

import re
from collections import Counter
from dataclasses import dataclass

from mlbench_cli.errors import UsageError
from mlbench_cli.util.masking import is_secret_variable

MAX_HOSTS = 2048
MAX_SLOTS = 64
_NAME = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SINGLE = re.compile(r"'([^']*)'\s*(?:\s#.*)?")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:\s#.*)?')
_EXPANDED = re.compile(r"(?<!\\)(?:\$\w+|\$\{[^}]*\}?|\$\([^)]*\)?|`[^`]*`?)")
_GIVEN_BY_ENGINE = re.compile(r"MLBENCH_|(LOCAL_)?(RANK|WORLD_SIZE)$|NODE_RANK$|MASTER_(ADDR|PORT)$")


@dataclass(frozen=True)
class HostEntry:
    """One listed host: `login` as [USER@]HOST for ssh, and how many workers it takes."""

    login: str
    slots: int = 1


def parse_list(text: str) -> list[HostEntry]:
    """ "m1,m2:4": hosts with commas, each with its slots behind a colon as in `mpirun --host`. Raises UsageError."""
    entries = []
    for part in text.strip().strip(",").split(","):
        name, slots = _split(part.strip(), part.strip()[:80])
        entries.append(HostEntry(_check_name(name, f'"{part.strip()[:80]}"'), _check_slots(slots or "1", part)))
    return _check_unique(entries)


def parse_file(text: str) -> list[HostEntry]:
    """A host file: one host a line, "slots=N" or ":N" behind it, comments with #. Raises UsageError with the line.

    Both spellings of mpirun (Open MPI's "HOST slots=N max_slots=M", MPICH's "HOST:N") and bare names are read.
    """
    entries = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        name, *words = line.split()
        place = f"line {number} of the host file ({line[:80]!r})"
        name, count = _split(name, place)
        slots = _check_slots(count, place) if count else 1
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key not in ("slots", "max_slots", "max-slots", "cpu"):
                raise UsageError(f"{place}: {word[:40]!r} is not valid.", hint="HOST slots=N")
            if key == "slots":
                slots = _check_slots(value, place)
        entries.append(HostEntry(_check_name(name, place), slots))
    if not entries:
        raise UsageError("The host file names no host.", hint="Write one host per line: HOST slots=N")
    return _check_unique(entries)


def parse_environment(text: str) -> dict[str, str]:
    """An environment file: KEY=VALUE a line, "export" before it and quotes around the value allowed.

    Variables that the engine sets are ignored; names that look like secrets are rejected. Raises UsageError.
    """
    found: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"^export\s+", "", raw.strip())
        if not line or line.startswith(("#", "[")):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageError(f"Line {number} of the environment file is not KEY=VALUE: {line[:80]!r}.")
        if is_secret_variable(name):
            raise UsageError(
                f"Line {number} of the environment file sets {name}, which looks like a secret.",
                hint="Its value would be stored in the results; set it on the hosts instead.",
            )
        value = _read_value(value, f"Line {number} of the environment file")
        if not _GIVEN_BY_ENGINE.match(name):
            found[name] = value
    return found


def _read_value(text: str, place: str) -> str:
    """The value behind KEY=, as a shell reads it: quoted, or up to a comment. Raises UsageError for what only a shell
    could replace."""
    if quoted := _SINGLE.fullmatch(text):
        return quoted[1]
    double = _DOUBLE.fullmatch(text)
    if double is None and text[:1] in ("'", '"'):
        raise UsageError(f"{place}: the quotes of {text[:80]!r} do not end, or text follows them.")
    value = double[1] if double else re.split(r"(?:^|\s)#", text, maxsplit=1)[0].strip()
    if (found := _EXPANDED.search(value)) or "\0" in value:
        raise UsageError(
            f"{place}: no shell reads the file, so {found[0]!r} would stay as it is."
            if found
            else f"{place}: a NUL character is in the value.",
            hint="Write the value itself, or put it into single quotes if it is meant literally.",
        )
    return re.sub(r'\\(["\\$`])', r"\1", value) if double else value


def _split(text: str, place: str) -> tuple[str, str]:
    """A host, and what is behind its colon. Raises UsageError for an address of IPv6."""
    if text.count(":") > 1:
        raise UsageError(
            f"{place}: a host is listed by its name, not by an IPv6 address.",
            hint="In ~/.ssh/config: Host NAME, and below it HostName ADDRESS",
        )
    name, _, count = text.partition(":")
    return name, count


def _check_name(name: str, place: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > 255:
        raise UsageError(f'{place}: "{name[:80]}" is not a valid host name.', hint="HOST or USER@HOST")
    return name


def _check_slots(text: str, place: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= MAX_SLOTS:
        raise UsageError(f"{place}: {text[:20]!r} is not a number of slots from 1 to {MAX_SLOTS}.")
    return int(text)


def _check_unique(entries: list[HostEntry]) -> list[HostEntry]:
    """The entries. Duplicate hosts are rejected, because their ranks would share resources."""
    if len(entries) > MAX_HOSTS:
        raise UsageError(f"{len(entries)} hosts: the maximum is {MAX_HOSTS}.")
    for name, count in Counter(entry.login.rpartition("@")[2] for entry in entries).items():
        if count > 1:
            raise UsageError(
                f"The host {name} is listed {count} times.",
                hint=f"List it once, with the number of its workers: {name} slots={count}",
            )
    return entries
