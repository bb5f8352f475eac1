"""Whether an archive is what was sealed: every byte of it, and whether what it says agrees with itself."""

import hashlib
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from mlbench_cli.errors import NotFoundError
from mlbench_cli.model import Outcome
from mlbench_cli.results.archive import canonical_zip, layout
from mlbench_cli.results.archive.canonical_zip import ZipDamage
from mlbench_cli.results.archive.documents import label_of, price_of
from mlbench_cli.results.archive.events import SPREAD, Judge, Reading, meets, number, proves
from mlbench_cli.results.archive.layout import DamagedArchive
from mlbench_cli.results.archive.official import official_line, official_text
from mlbench_cli.results.archive.reader import Archive, Zip
from mlbench_cli.spec import OPEN, canonical_json

MAX_PROBLEMS = 1000


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an archive. `file` is its name in the archive, empty where it is the whole.

    `code` is one of: unsealed missing extra changed truncated malformed_sums unsafe_name link special duplicate order
    encrypted compressed header trailing_data too_large unreadable not_an_archive schema inconsistent.
    """

    code: str
    file: str
    message: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.file}: {self.message}" if self.file else self.message


def verify(path: Path) -> list[Problem]:
    """Everything that is wrong with the archive in a folder or zip; empty if it is as it was sealed.

    A zip must have, byte for byte, the canonical form of its contents. Memory is bounded whatever the file declares.
    Raises NotFoundError where there is nothing at `path`.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _told(_folder_problems(path))
        if not stat.S_ISREG(mode):
            return [Problem("not_an_archive", "", "it is neither a folder nor a file")]
        with open(path, "rb") as file:
            return verify_zip(file, path)
    except FileNotFoundError as error:
        if Path(error.filename) != path:
            return [Problem("missing", "", f"{error.filename} went away while it was checked")]
        raise NotFoundError(
            f"There is no archive {path}.", hint="mlbench status, then: mlbench download NAME"
        ) from None
    except OSError as error:
        return [Problem("unreadable", "", f"{error.filename or path} cannot be read: {error.strerror or error}")]


def verify_zip(file: BinaryIO, path: Path | str = "zip") -> list[Problem]:
    """As `verify`, for a zip in an open, seekable file."""
    return _told(_zip_problems(file, path))


def open_verified(path: Path) -> Archive:
    """The archive at `path`. Raises DamagedArchive with the first problem where there is one."""
    problems = verify(path)
    if problems:
        raise DamagedArchive(path, problems[0].file, problems[0].message, problem=problems[0].code)
    return Archive.open(path)


def _told(problems: Iterator[Problem]) -> list[Problem]:
    """The problems, and the damage that ended the search for more."""
    found: list[Problem] = []
    try:
        for problem in problems:
            found.append(problem)
            if len(found) >= MAX_PROBLEMS:
                found.append(Problem(problem.code, "", f"more than {MAX_PROBLEMS} problems; the search ended here"))
                break
    except DamagedArchive as damage:
        found.append(Problem(damage.problem, _shown(damage.file), damage.plain))
    except ZipDamage as damage:
        found.append(Problem(damage.code, _shown(damage.name), str(damage)))
    return found


# --- bytes --------------------------------------------------------------------------------------------------------


def _folder_problems(path: Path) -> Iterator[Problem]:
    names, trouble = [], False
    for name, mode in sorted(layout.walk(path)):
        if stat.S_ISREG(mode):
            names.append(name)
            continue
        trouble = True
        link = stat.S_ISLNK(mode)
        yield Problem(
            "link" if link else "special", _shown(name), f"it is {'a symbolic link' if link else 'no regular file'}"
        )
    archive = Archive.open(path)
    if layout.SUMS not in names:
        sealable = layout.RUN in names or layout.log_names(names)
        reason = (
            "the run is not finished, or its results are not fetched" if sealable else "it is no archive of mlbench"
        )
        yield Problem("unsealed" if sealable else "not_an_archive", layout.SUMS, f"there is no SHA256SUMS: {reason}")
        return

    def digest(name: str) -> str:
        with archive.open_file(name) as file:
            return layout.digest(file)

    yield from _archive_problems(archive, digest, trouble)


def _zip_problems(file: BinaryIO, path: Path | str) -> Iterator[Problem]:
    zipped = Zip(file)
    if layout.SUMS not in zipped.entries:
        yield Problem("not_an_archive", layout.SUMS, "there is no SHA256SUMS: it is no archive of mlbench")
        return

    def digest(name: str) -> str:
        sha = hashlib.sha256()
        for chunk in canonical_zip.read_data(file, zipped.entries[name]):
            sha.update(chunk)
        return sha.hexdigest()

    yield from _archive_problems(Archive(path, zipped), digest, False)


def _archive_problems(archive: Archive, digest: Callable[[str], str], trouble: bool) -> Iterator[Problem]:
    """Files against SHA256SUMS; where all of them are as they were, their contents against each other."""
    sums = layout.parse_sums(archive.read(layout.SUMS, layout.MAX_SUMS_BYTES), archive.path)
    names = {*archive.names} - {layout.SUMS}
    for name in sorted(names | {*sums}):
        problem = None
        if name not in names:
            problem = Problem("missing", name, "it is missing")
        elif name not in sums:
            problem = Problem("extra", _shown(name), "it is not listed in SHA256SUMS")
        else:
            try:
                if digest(name) != sums[name]:
                    problem = Problem("changed", name, "it is not what was sealed: its SHA-256 differs")
            except ZipDamage as damage:
                problem = Problem(damage.code, name, str(damage))
            except OSError as error:
                problem = Problem("unreadable", name, f"it cannot be read: {error.strerror}")
        if problem:
            trouble = True
            yield problem
    if not trouble:
        yield from _content_problems(archive)


# --- contents -----------------------------------------------------------------------------------------------------


def _content_problems(archive: Archive) -> Iterator[Problem]:
    missing = [name for name in layout.REQUIRED if name not in archive.names]
    for name in missing:
        yield Problem("missing", name, "every archive has it")
    if missing:
        return
    schema = [
        *_schema_problems(layout.RUN, archive.run, _RUN),
        *_schema_problems(layout.RESULT, archive.result, _RESULT),
        *_schema_problems(layout.ENVIRONMENT, archive.environment, _ENVIRONMENT),
        *_schema_problems(layout.FINDINGS, archive.document(layout.FINDINGS), _FINDINGS),
    ]
    yield from schema
    for _ in archive.resources():
        pass  # each line is parsed
    if schema:
        return
    for file, message in _contradictions(archive):
        yield Problem("inconsistent", file, message)


def _contradictions(archive: Archive) -> Iterator[tuple[str, str]]:
    """Where an archive says two things that cannot both be true."""
    run, result = archive.run, archive.result
    spec = run["spec"]
    if run["spec_hash"] != hashlib.sha256(canonical_json(spec)).hexdigest()[:16]:
        yield layout.RUN, "spec_hash is not the hash of spec"
    pairs = {"run": run["name"], "id": run["id"]}
    pairs |= {key: spec.get(key) for key in ("task", "preset", "engine", "cluster", "backend", "workers", "device")}
    for key, value in pairs.items():
        if result[key] != value:
            yield layout.RESULT, f"{key} is {result[key]!r}, but {value!r} in run.json"
    if result["price"] != price_of(spec.get("price") or {}, result["wall_seconds"]):
        yield layout.RESULT, "price does not follow from run.json and wall_seconds"
    if result["label"] != label_of(spec.get("functional_only")):
        yield layout.RESULT, "label does not follow from functional_only in run.json"
    yield from _against_logs(archive)
    goal, outcome = result["goal"], result["outcome"]
    if outcome == "goal_reached" and not (goal and goal["reached"]):
        yield layout.RESULT, "the outcome is goal_reached, but the goal is not marked as reached"
    if outcome == "goal_reached" and any(worker["exit_code"] for worker in result["worker_states"]):
        yield layout.RESULT, "the outcome is goal_reached, but a rank has failed"
    last = goal["last"] if goal and outcome == "budget_spent" else None
    if last is not None and not proves({**goal, "value": last}, archive.lines(layout.METRICS)):
        yield layout.METRICS, f"no metric has the value {last!r} that result.json says the budget ended with"
    if goal and goal["reached"]:
        if not meets(goal["value"], goal["comparison"], goal["threshold"]):
            yield layout.RESULT, f"the goal is marked as reached, but its value is {goal['value']!r}"
        elif not proves(goal, archive.lines(layout.METRICS)):
            yield (
                layout.METRICS,
                f"no metric has the value {goal['value']!r} of the goal that result.json calls reached",
            )
    if result["official_line"] != official_line(result):
        yield layout.RESULT, "official_line does not follow from the other fields"
    if archive.read(layout.OFFICIAL) != official_text(result).encode():
        yield layout.OFFICIAL, "it does not follow from result.json"


def _against_logs(archive: Archive) -> Iterator[tuple[str, str]]:
    """Where metrics and result are not what rank 0 and the others have reported in their logs."""
    result = archive.result
    asked = result["goal"] if result["preset"] == OPEN else None
    reading = Reading(result["world_size"], Judge(asked, result["started"]) if asked else None)

    def derived() -> Iterator[bytes]:
        for rank, name in archive.logs.items():
            with archive.open_file(name) as log:
                yield from reading.metrics(rank, log)

    for index, (found, expected) in enumerate(zip_longest(archive.lines(layout.METRICS), derived()), 1):
        if found != expected:
            raise DamagedArchive(
                archive.path, layout.METRICS, f"line {index} does not follow from the logs", problem="inconsistent"
            )
    told: Mapping[str, Any] = reading.result or {"timings": {}, "details": {}, "synthetic": False}
    for key in ("timings", "updates", "samples", "epochs", "synthetic", "data", "details", "budget_seconds"):
        if result[key] != told.get(key):
            yield layout.RESULT, f"{key} is not what rank 0 reported in its log"
    goal, claimed = result["goal"], told.get("goal")
    if goal and goal["value"] is not None:
        for key in ("metric", "comparison", "threshold", "value", "last"):
            if not claimed or goal[key] != claimed[key]:
                yield layout.RESULT, f"goal.{key} is not what rank 0 reported in its log"
    for key in ("wall", "training"):
        if result["task_seconds"][key] != told.get(f"{key}_seconds"):
            yield layout.RESULT, f"task_seconds.{key} is not what rank 0 reported in its log"


Check = Callable[[Any], bool]


def _schema_problems(file: str, value: Mapping[str, Any], fields: Mapping[str, Check]) -> Iterator[Problem]:
    for key, check in fields.items():
        if key not in value:
            yield Problem("schema", file, f'"{key}" is missing')
        elif not check(value[key]):
            yield Problem("schema", file, f'"{key}" is {_brief(value[key])}, which it cannot be')


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _amount(value: Any) -> bool:
    return number(value) and value >= 0


def _moment(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.endswith("Z") and datetime.fromisoformat(value) is not None
    except ValueError:
        return False


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*values: Any) -> Check:
    return lambda value: any(value is known or value == known for known in values)


def _object(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(key in value and check(value[key]) for key, check in fields.items())
    )


def _map(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


_SECONDS = _object(wall=_optional(_amount), training=_optional(_amount))
_SPEC = _object(task=_text, workers=_count)
_GOAL = _object(
    metric=_text,
    comparison=_one_of(">=", "<="),
    threshold=number,
    kind=_one_of("full", "light"),
    value=_optional(number),
    last=_optional(number),
    wording=_text,
    reached=_one_of(True, False),
    seconds=_optional(_SECONDS),
)
_RUN: dict[str, Check] = {"id": _text, "name": _text, "created": _moment, "spec_hash": _text, "spec": _SPEC}
_RESULT: dict[str, Check] = {
    **dict.fromkeys(("run", "id", "task", "preset", "engine", "cluster", "backend", "device"), _text),
    **dict.fromkeys(("workers", "world_size"), _count),
    "outcome": _one_of(*Outcome),
    "exit_code": _optional(lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "started": _optional(_moment),
    "finished": _moment,
    "wall_seconds": _optional(_amount),
    "task_seconds": _SECONDS,
    "goal": lambda value: value is None or (_GOAL(value) and not (value["reached"] and value["seconds"] is None)),
    "timings": _map(_object(**dict.fromkeys(SPREAD, _amount))),
    **dict.fromkeys(("updates", "samples", "epochs", "budget_seconds"), _optional(_amount)),
    "synthetic": lambda value: isinstance(value, bool),
    "data": _optional(_text),
    "division": _object(word=_optional(_one_of("closed", "open")), reason=_optional(_text)),
    "label": _object(word=_one_of("functional", "performance"), reason=_optional(_text)),
    "first_failed": _optional(_count),
    "worker_states": _list(
        _object(rank=_count, phase=_text, exit_code=_optional(lambda value: isinstance(value, int)))
    ),
    "details": lambda value: isinstance(value, dict),
    "price": _optional(lambda value: isinstance(value, dict)),
    "official_line": _optional(_text),
}
_ENVIRONMENT: dict[str, Check] = {"client": _object(), "ranks": _map(_object())}
_FINDINGS: dict[str, Check] = {"findings": _list(_object(code=_text, summary=_text))}


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown(name: str) -> str:
    """A foreign name without control characters or broken Unicode."""
    return name if name.isprintable() else ascii(name)[1:-1]
