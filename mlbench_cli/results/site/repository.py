"""A repository of results: its layout, and the check that its CI runs on every submission.

    results/TASK/PRESET/YYYY-MM-DD_NAME/    one claim: archive zips of all repeats, entry.json, receipts
    rules/default.yaml, rules/TASK.yaml     requirements for claims
    allowed_signers, withdrawn.jsonl

Numbers are only in the archives, and nothing generated is committed.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.results.analysis.convergence import (
    TrainingKey,
    decide_convergence,
    epochs_to_goal,
    training_key,
)
from mlbench_cli.results.analysis.figures import IN_DOUBT
from mlbench_cli.results.analysis.series import group_runs
from mlbench_cli.results.analysis.stats import MIN_REFERENCE, Verdict
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.site.entries import (
    ENTRY,
    WITHDRAWN,
    Entry,
    Refusal,
    Withdrawal,
    find_sources,
    read_entry,
)
from mlbench_cli.util.yaml_text import read_yaml

TEMPLATES = Path(__file__).parent / "repository"
RESULTS, RULES, SIGNERS = "results", "rules", "allowed_signers"
LARGE = ".lfs.zip"  # the names of archives that git LFS keeps, see .gitattributes
MAX_MISSING = 5  # repeats listed by name
MAX_REPEATS = 10_000  # that a claim can be asked for
_REPEAT = re.compile(r"(.+)-r(\d+)")
_CLAIM = re.compile(r"\d{4}-\d{2}-\d{2}_[a-z0-9][a-z0-9._-]{0,60}")


@dataclass(frozen=True)
class Rules:
    """The requirements for a claim of a task.

    repeats         minimum number of successful runs
    max_megabytes   of one archive
    max_lfs_megabytes   of one that git LFS keeps
    signed          whether every archive must be signed by one of allowed_signers
    divisions       accepted divisions; empty: any or none
    synthetic       whether generated data are allowed
    functional      whether runs on functional-only clusters are allowed
    """

    repeats: int = 3
    max_megabytes: float = 10.0
    max_lfs_megabytes: float = 200.0
    signed: bool = True
    divisions: tuple[str, ...] = ()
    synthetic: bool = False
    functional: bool = False


class Objection(NamedTuple):
    """A reason for rejecting a submission; `file` is relative to the repository."""

    file: str
    message: str


def init_repository(folder: Path) -> list[Path]:
    """Write a new repository of results; returns the written files. Raises UsageError for a non-empty folder."""
    if folder.exists() and (not folder.is_dir() or any(path.name != ".git" for path in folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty.", hint="Give the name of a new folder.")
    written = []
    for source in sorted(path for path in TEMPLATES.rglob("*") if path.is_file()):
        target = folder / str(source.relative_to(TEMPLATES)).replace("dot-", ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text("utf-8").replace("@VERSION@", __version__)
        target.write_text(text, "utf-8")
        written.append(target)
    (folder / RESULTS).mkdir()
    (folder / RESULTS / ".gitkeep").touch()
    return written


def check_repository(folder: Path, work: Path) -> tuple[int, list[Objection]]:
    """The number of claims in a repository, and all objections. `work` is a folder for copies of archives.

    Raises UsageError if there is no repository.
    """
    results = folder / RESULTS
    if not results.is_dir():
        raise UsageError(f"{folder} is not a results repository.", hint=f"mlbench site init {folder}")
    objections: list[Objection] = []
    known = _Known()
    claims = sorted({path.parent for path in find_sources([results]).archives})
    stray = [path for path in sorted(results.rglob("*")) if path.is_file() and path.parent not in claims]
    objections += [
        Objection(_relative(path, folder), "it belongs to no claim: there is no archive next to it")
        for path in stray
        if path.name != ".gitkeep"
    ]
    objections += [
        Objection(_relative(path, folder), "it is a link or no regular file")
        for path in sorted(folder.rglob("*"))
        if ".git" not in path.parts and (path.is_symlink() or not (path.is_file() or path.is_dir()))
    ]
    for claim in claims:
        objections += _check_claim(claim, folder, work, known)
    objections += _check_convergence(known)
    objections += _check_withdrawals(find_sources([folder]).withdrawn, known)
    return len(claims), objections


@dataclass
class _Known:
    """Facts from the claims read so far: run -> claim, digests by claim, epochs to the goal by training."""

    runs: dict[str, str] = field(default_factory=dict)
    digests: dict[str, set[str]] = field(default_factory=dict)
    epochs: dict[TrainingKey, dict[str, list[float]]] = field(default_factory=dict)


def _check_convergence(known: _Known) -> Iterator[Objection]:
    """Object to claims that reach the goal in implausibly few epochs compared with the same training in other
    claims."""
    for claims in known.epochs.values():
        for place, epochs in claims.items():
            others = [value for other, own in claims.items() if other != place for value in own]
            if len(others) < MIN_REFERENCE:
                continue
            verdict, reason = decide_convergence(others, epochs)
            if verdict is Verdict.FAILED:
                yield Objection(place, f"it is outside the convergence band of the other claims: {reason}")


def _check_withdrawals(withdrawn: Sequence[Withdrawal], known: _Known) -> Iterator[Objection]:
    """Object to partly withdrawn claims."""
    gone = {each.digest for each in withdrawn}
    for place, digests in known.digests.items():
        if digests & gone and digests - gone:
            yield Objection(
                WITHDRAWN,
                f"it withdraws {len(digests & gone)} of the {len(digests)} runs of {place}: a claim must be "
                "withdrawn as a whole",
            )
    for digest in sorted(gone.difference(*known.digests.values())):
        yield Objection(WITHDRAWN, f"no archive here has the digest {digest[:16]}...")


def read_rules(folder: Path, task: str) -> Rules:
    """The rules of a task: rules/default.yaml overridden by rules/TASK.yaml. Raises UsageError."""
    rules = Rules()
    for name in ("default", task):
        path = folder / RULES / f"{name}.yaml"
        if path.is_file():
            rules = replace(rules, **_parse_rules(path, read_yaml(path.read_text("utf-8"))))
    return rules


def _parse_rules(path: Path, document: Any) -> Mapping[str, Any]:
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(f"{path}: not a mapping of rules to values.")
    known = {item.name: item for item in fields(Rules)}
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key not in known:
            raise UsageError(f"{path}: unknown rule {key!r}.{did_you_mean(str(key), list(known))}")
        default = known[key].default
        if key == "divisions":
            right = isinstance(value, list) and all(isinstance(item, str) for item in value)
            value = tuple(value) if right else value
        else:
            right = isinstance(value, bool) if isinstance(default, bool) else (
                isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            )  # fmt: skip
        if not right:
            raise UsageError(f"{path}: {key} cannot be {value!r}.")
        found[str(key)] = value
    return found


def _check_claim(claim: Path, folder: Path, work: Path, known: _Known) -> Iterator[Objection]:
    """The objections to one claim; updates `known`, the facts from previous claims."""
    place = _relative(claim, folder)
    parts = claim.relative_to(folder / RESULTS).parts
    if len(parts) != 3 or not _CLAIM.fullmatch(parts[2]):
        yield Objection(place, "a claim's folder is results/TASK/PRESET/YYYY-MM-DD_NAME")
        return
    task, preset = parts[:2]
    rules = read_rules(folder, task)
    signers = folder / SIGNERS
    entries: list[Entry] = []
    for path in sorted(claim.glob("*.zip")):
        where = _relative(path, folder)
        found = _read(path, work, signers if signers.is_file() and signers.read_text("utf-8").strip() else None)
        if isinstance(found, Refusal):
            yield Objection(where, found.message)
            continue
        entries.append(found)
        if found.run in known.runs:
            yield Objection(where, f"it is also a run of {known.runs[found.run]}")
        known.runs[found.run] = place
        known.digests.setdefault(place, set()).add(found.digest)
        with Archive.open(path) as archive:
            if (key := training_key(archive)) is not None:
                known.epochs.setdefault(key, {}).setdefault(place, []).extend(epochs_to_goal([archive]))
        yield from _check_entry(found, where, rules, task, preset)
    if entries and not (claim / ENTRY).is_file():
        yield Objection(place, f"{ENTRY} is missing; it says who submits the claim, and on what hardware")
    series = group_runs(entry.measurement for entry in entries)
    settings = [point for group in series.groups for point in group.points]
    if len(settings) > 1:
        yield Objection(place, f"a claim is one setting and one number of workers, but this one has {len(settings)}")
    for missing in _missing_repeats(entries):
        yield Objection(place, f"{missing} is missing: a claim includes all repeats, even failed ones")
    good = sum(entry.measurement.good for entry in entries)
    if good < rules.repeats:
        yield Objection(place, f"{good} successful runs; {task} needs {rules.repeats}")


def _missing_repeats(entries: Sequence[Entry]) -> list[str]:
    """Names of missing repeats: of those that the command asked for, and below the highest number that is there."""
    found: dict[str, set[int]] = {}
    asked: dict[str, int] = {}
    for entry in entries:
        if match := _REPEAT.fullmatch(entry.name):
            found.setdefault(match[1], set()).add(int(match[2]))
            asked[match[1]] = max(asked.get(match[1], 0), int(match[2]), min(entry.repeats, MAX_REPEATS))
    missing = (
        f"{name}-r{number}" for name, own in found.items() for number in range(1, asked[name] + 1) if number not in own
    )
    return list(islice(missing, MAX_MISSING))


def _check_entry(entry: Entry, where: str, rules: Rules, task: str, preset: str) -> Iterator[Objection]:
    key = entry.measurement.key
    if entry.measurement.outcome == IN_DOUBT:
        yield Objection(where, "its evidence contradicts itself, so it has no figures")
    if (key.task, key.preset) != (task, preset):
        yield Objection(where, f"it is {key.task} ({key.preset}), not {task} ({preset})")
    is_large = entry.source.endswith(LARGE)
    most = rules.max_lfs_megabytes if is_large else rules.max_megabytes
    if entry.size > most * 1e6:
        more = "" if is_large else f"; up to {rules.max_lfs_megabytes:g} if its name ends with {LARGE}, for git LFS"
        yield Objection(where, f"it has {entry.size / 1e6:.1f} MB; at most {most:g} are allowed{more}")
    if rules.signed and entry.signer is None:
        yield Objection(where, f"it is not signed by anyone in {SIGNERS}: {entry.origin}")
    if rules.divisions and key.division not in rules.divisions:
        yield Objection(where, f"it is in the division {key.division}; allowed: {', '.join(rules.divisions)}")
    if key.synthetic and not rules.synthetic:
        yield Objection(where, "its data are synthetic")
    if key.label and not rules.functional:
        yield Objection(where, "it is functional, not a performance measurement")


def _read(path: Path, work: Path, signers: Path | None) -> Entry | Refusal:
    (work / "archives").mkdir(parents=True, exist_ok=True)
    try:
        return read_entry(path, work, signers)
    except UsageError as error:
        return Refusal(str(path), "entry", error.message)
    finally:
        shutil.rmtree(work / "archives", ignore_errors=True)


def format_annotation(objection: Objection) -> str:
    """An error annotation for GitHub's runner."""

    def escape(text: str, more: Sequence[tuple[str, str]] = ()) -> str:
        for letter, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A"), *more):
            text = text.replace(letter, code)
        return text

    file = escape(objection.file, ((":", "%3A"), (",", "%2C")))
    return f"::error file={file},title=Refused::{escape(objection.message)}"


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
