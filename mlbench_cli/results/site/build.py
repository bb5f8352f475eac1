"""Build a site: from folders of archives to a folder of static files, which appears only when it is complete."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlbench_cli import __version__
from mlbench_cli.errors import MlbenchError, UsageError, naming_file_on_os_error
from mlbench_cli.results import receipts
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.sign import OriginError
from mlbench_cli.results.archive.verify import MAX_SIGNATURE_BYTES, RECEIPT_NAMESPACE, find_signature_problem
from mlbench_cli.results.figures.chart import to_csv
from mlbench_cli.results.site.claims import Claim, Contest, ReceiptNote, attach_receipts, make_contests
from mlbench_cli.results.site.entries import MANY, Entry, Refusal, Sources, find_sources, is_plain, read_entries
from mlbench_cli.results.site.pages import (
    FOLDER,
    SCRIPT,
    Look,
    render_claim,
    render_overview,
    render_task,
    site_css,
)
from mlbench_cli.results.site.pictures import contest_charts
from mlbench_cli.util.csv_text import format_csv
from mlbench_cli.util.text import counted, one_line

INDEX = "index.json"
SIGNERS = "allowed_signers"
CSV_HEAD = (
    *("id", "task", "preset", "goal", "division", "machine", "method", "network", "workers", "value", "low", "high"),
    *("unit", "runs", "failed_runs", "cost_usd", "cost_is_list_price", "conditions", "signers", "date", "mlbench"),
    *("status", "energy_joules", "energy_source"),
)


@dataclass(frozen=True)
class SiteOptions:
    """Options of a site.

    signers      file of allowed signers, in git's format
    worker_hour  US dollars per worker and hour for runs without a known price
    leave_out    leave out rejected archives and list them
    """

    title: str = "mlbench results"
    address: str = ""
    signers: Path | None = None
    worker_hour: float | None = None
    leave_out: bool = False


@dataclass
class SiteSummary:
    """The numbers of claims, entries and receipts of a site, and the rejected archives."""

    claims: int = 0
    archives: int = 0
    bytes: int = 0
    largest_page: int = 0
    receipts: int = 0
    refused: list[Refusal] = field(default_factory=list)
    disclosed: dict[str, set[str]] = field(default_factory=dict)


class RefusedArchives(MlbenchError):
    """Archives that a site must not show."""

    code = "refused_archives"
    exit_code = 7


def build_site(
    folders: Sequence[Path], output: Path, options: SiteOptions, notice: Callable[[str], None] = lambda _: None
) -> SiteSummary:
    """Write the site of all archives below `folders` to `output`, replacing an earlier site.

    Raises RefusedArchives if an archive or receipt does not verify (unless `leave_out`), UsageError for an output
    folder with other files.
    """
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not (output / INDEX).is_file())):
        raise UsageError(f"{output} exists and is not a results site.", hint="Name a new folder with --output.")
    sources = find_sources(folders, output)
    if not sources.archives:
        raise UsageError(
            f"There is no archive in {' or '.join(map(str, folders))}.", hint="mlbench download NAME --to FOLDER"
        )
    work = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    try:
        with naming_file_on_os_error(output, "written"):
            work.mkdir(parents=True)
            summary = _write(sources, work, options, notice)
            _replace(work, output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return summary


def _replace(work: Path, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    old = output.with_name(f".{output.name}.{os.getpid()}.old")
    if output.exists():
        output.replace(old)
    work.replace(output)
    shutil.rmtree(old, ignore_errors=True)


def _write(sources: Sources, site: Path, options: SiteOptions, notice: Callable[[str], None]) -> SiteSummary:
    summary = SiteSummary()
    entries: dict[str, Entry] = {}
    by_run: dict[str, Entry] = {}
    for found in read_entries(sources.archives, site, options.signers):
        if isinstance(found, Refusal):
            summary.refused.append(found)
        elif (first := by_run.setdefault(found.run, found)).digest != found.digest:
            (site / found.file).unlink()
            message = f"it is of the same run as {first.source}, but differs"
            summary.refused.append(Refusal(found.source, "duplicate", message))
        else:
            entries.setdefault(found.digest, found)
    notice(f"{len(entries)} of {len(sources.archives)} archives verified")
    notes = _add_receipts(sources, entries, site, options, summary)
    if summary.refused and not options.leave_out:
        raise refuse(summary.refused)
    known = list(entries.values())
    contests = attach_receipts(make_contests(known, sources.withdrawn, options.worker_hour), notes)
    _add_assets(site, options)
    look = Look(options.title, options.address.rstrip("/"))
    _write_pages(contests, site, look, summary)
    _write_data(contests, site, options)
    summary.claims = sum(len(contest.claims) for contest in contests)
    summary.archives, summary.receipts = len(known), len(notes)
    summary.bytes = sum(entry.size for entry in known)
    for entry in known:
        for kind, values in entry.disclosed.items():
            summary.disclosed.setdefault(kind, set()).update(values)
    return summary


def refuse(refused: Sequence[Refusal]) -> RefusedArchives:
    """The error for archives that do not verify: the first three in words, all of them as details."""
    shown = "; ".join(f"{one_line(each.source)}: {one_line(each.message, 300)}" for each in refused[:3])
    more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
    count = counted(len(refused), "archive")
    return RefusedArchives(
        f"{count} cannot be shown: {shown}{more}.",
        hint="Remove them, or add --leave-out to build the site without them.",
        details={"refused": [each._asdict() for each in refused]},
    )


def _add_receipts(
    sources: Sources, entries: dict[str, Entry], site: Path, options: SiteOptions, summary: SiteSummary
) -> list[ReceiptNote]:
    """The receipts that can be derived from archives of this site; others are rejected, and other JSON files
    ignored."""
    notes = []
    for path in sources.documents:
        if not _is_receipt(path):
            continue
        try:
            notes.append(_read_receipt(path, entries, site, options))
        except MlbenchError as error:
            summary.refused.append(Refusal(str(path), "receipt", error.message))
    return notes


def _is_receipt(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b'"receipt"' in file.read(4096)
    except OSError:
        return False


def _read_receipt(path: Path, entries: dict[str, Entry], site: Path, options: SiteOptions) -> ReceiptNote:
    receipt = receipts.read_receipt(path)
    missing = [digest for digest in receipt.digests if digest not in entries]
    if missing:
        raise UsageError(f"it names {len(missing)} archives that are missing here, e.g. {missing[0][:16]}...")
    with ExitStack() as stack:
        named = [
            stack.enter_context(Archive.open(site / entries[digest].file, is_shown=True))
            for digest in dict.fromkeys(receipt.digests)
        ]
        checked = receipts.check_receipt(receipt, named)
    if not checked.is_derived:
        raise UsageError(f"it does not follow from its archives: {checked.problems[0]}")
    document: dict[str, Any] = dict(receipt.document)
    signer = None
    if options.signers is not None and is_plain(receipt.signature_path):
        try:
            signer = receipts.check_receipt_origin(receipt, options.signers).principal
        except OriginError:
            signer = None
    signature = _read_signature(receipt)
    digest = hashlib.sha256(receipt.data).hexdigest()
    file = f"receipts/{digest[:16]}.json"
    (site / "receipts").mkdir(exist_ok=True)
    (site / file).write_bytes(receipt.data)
    if signature is not None:
        (site / f"{file}.sig").write_bytes(signature)
    return ReceiptNote(
        file=file,
        verdict=str(document["verdict"]),
        reason=checked.reason,
        margin=float(document["margin"]),
        created=str(document["created"]),
        original=tuple(str(run["digest"]) for run in document["original"]),
        reproduction=tuple(str(run["digest"]) for run in document["reproduction"]),
        signer=signer,
    )


def _read_signature(receipt: receipts.Receipt) -> bytes | None:
    """The signature beside a receipt, if there is one. Raises UsageError for anything else of that name."""
    path = receipt.signature_path
    if not path.is_symlink() and not path.exists():
        return None
    if not is_plain(path):
        raise UsageError(f"{path.name} is a link or no regular file")
    with open(path, "rb") as file:
        data = file.read(MAX_SIGNATURE_BYTES + 1)
    if problem := find_signature_problem(data[:MAX_SIGNATURE_BYTES], RECEIPT_NAMESPACE):
        raise UsageError(f"{path.name}: {problem}")
    return data


def _add_assets(site: Path, options: SiteOptions) -> None:
    assets = site / "assets"
    assets.mkdir()
    (assets / "site.css").write_text(site_css(), "utf-8")
    shutil.copyfile(FOLDER / SCRIPT, assets / SCRIPT)
    if options.signers is not None:
        shutil.copyfile(options.signers, site / SIGNERS)


def _write_pages(contests: Sequence[Contest], site: Path, look: Look, summary: SiteSummary) -> None:
    for name in ("tasks", "results", "data"):
        (site / name).mkdir()
    pages = {"index.html": render_overview(contests, look, summary.refused)}
    for task in dict.fromkeys(contest.job.task for contest in contests):
        pages |= render_task(contests, task, look)
    for name, text in pages.items():
        data = text.encode()
        summary.largest_page = max(summary.largest_page, len(data))
        (site / name).write_bytes(data)
    for contest in contests:
        for figure in contest_charts(contest):
            (site / "data" / f"{figure.key}.csv").write_text(to_csv([figure]), "utf-8")
    claims = [(claim, contest) for contest in contests for claim in contest.claims]
    for size in _write_claims(claims, site, look):
        summary.largest_page = max(summary.largest_page, size)


def _write_claims(claims: Sequence[tuple[Claim, Contest]], site: Path, look: Look) -> Iterator[int]:
    if len(claims) < MANY:
        yield from (_write_claim(item, site, look) for item in claims)
        return
    # Contests are sent once per process instead of once per claim.
    with ProcessPoolExecutor(initializer=_keep_claims, initargs=(claims, site, look)) as pool:
        yield from pool.map(_write_kept, range(len(claims)), chunksize=8)


_kept: tuple[Sequence[tuple[Claim, Contest]], Path, Look] | None = None


def _keep_claims(claims: Sequence[tuple[Claim, Contest]], site: Path, look: Look) -> None:
    global _kept
    _kept = (claims, site, look)


def _write_kept(number: int) -> int:
    assert _kept is not None
    claims, site, look = _kept
    return _write_claim(claims[number], site, look)


def _write_claim(item: tuple[Claim, Contest], site: Path, look: Look) -> int:
    claim, contest = item
    text, figures = render_claim(claim, contest, look, site)
    data = text.encode()
    (site / "results" / f"{claim.id}.html").write_bytes(data)
    for figure in figures:
        (site / "data" / f"{claim.id}-{figure.key}.csv").write_text(to_csv([figure]), "utf-8")
    return len(data)


def _write_data(contests: Sequence[Contest], site: Path, options: SiteOptions) -> None:
    rows = [claim.to_dict() for contest in contests for claim in contest.claims]
    document = {
        "version": 1,
        "mlbench": __version__,
        "title": options.title,
        "worker_hour_usd": options.worker_hour,
        "results": rows,
    }
    (site / INDEX).write_text(json.dumps(document, separators=(",", ":")) + "\n", "utf-8")
    cells = [[_cell(row[key]) for key in CSV_HEAD] for row in rows]
    (site / "results.csv").write_text(format_csv([CSV_HEAD, *cells]), "utf-8")


def _cell(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list) else value
