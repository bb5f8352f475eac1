"""Archives as Python objects: what `mlbench_cli.api` offers without a store. Import it from there."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlbench_cli.results.analysis.compare import Comparison
from mlbench_cli.results.analysis.compare import compare as compare_archives
from mlbench_cli.results.analysis.reproduction import Reproduction
from mlbench_cli.results.analysis.reproduction import judge_reproduction as judge_sides
from mlbench_cli.results.analysis.series import Series, collect
from mlbench_cli.results.analysis.tables import MetricPoint, MetricTable, ResourceTable, settings_of
from mlbench_cli.results.archive.evidence import load_evidence
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.judge import Judgement
from mlbench_cli.results.archive.judge import judge as judge_evidence
from mlbench_cli.results.archive.verify import Verification, open_verified, verify
from mlbench_cli.results.report.facts import collect as collect_facts


def open_archive(path: Path | str, *, verify: bool = True, unproven: bool = False) -> Archive:
    """The archive in a folder or zip.

    Raises NotFoundError; DamagedArchive with the first problem; UnprovenArchive (exit code 9) if something could not be
    derived from the evidence. With `unproven`, such an archive is opened anyway, with "(unproven)" after the names of
    run and task.
    """
    return open_verified(Path(path), unproven=unproven) if verify else Archive.open(Path(path))


def check_archive(path: Path | str) -> Verification:
    """Check digests and judge the evidence again. Returns every problem, and what was proved."""
    return verify(Path(path))


def metrics_of(archive: Archive) -> MetricTable:
    """All metrics in an archive."""
    name, workers = archive.name, int(archive.result["workers"])
    points = (MetricPoint.parse(name, workers, row) for row in archive.metrics())
    return MetricTable((point for point in points if point is not None), {name: settings_of(archive)})


def resources_of(archive: Archive) -> ResourceTable:
    """All resource samples in an archive."""
    return ResourceTable.parse(archive.name, archive.resources())


def series(archives: Iterable[Archive]) -> Series:
    """Group archives by comparable settings, average repeats, and compute speedups."""
    return collect(archives)


def compare(
    a: Sequence[Archive],
    b: Sequence[Archive],
    *,
    names: tuple[str, str] | None = None,
    across: Collection[str] = (),
) -> Comparison:
    """Two sides of archives: what differs, whether they may be compared, and how their figures relate.

    `names` are those of the sides; default: of their runs. `across` are the differences to accept.
    """
    return compare_archives(a, b, names, across)


def judge_reproduction(
    original: Sequence[Archive],
    reproduction: Sequence[Archive],
    *,
    margin: float = 0.1,
    figures: Sequence[str] = (),
) -> Reproduction:
    """Whether verified archives repeat the result of earlier ones within a margin; `mlbench reproduce` decides by it.

    `figures` are those that have to agree; default: what the original is about, such as the time to its goal.
    """
    return judge_sides(original, reproduction, margin, figures)


def judge(folder: Path) -> Judgement:
    """Judge the evidence in an archive's folder again and return its documents."""
    with open_archive(folder, verify=False) as archive:
        return judge_evidence(load_evidence(archive))


def report(archives: Sequence[Archive], *, title: str | None = None) -> dict[str, Any]:
    """The facts of `mlbench report` about verified archives."""
    return collect_facts(archives, title=title)
