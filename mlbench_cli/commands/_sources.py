"""From words on a command line to archives."""

from collections.abc import Sequence
from pathlib import Path

from mlbench_cli import console
from mlbench_cli.commands._common import results_of
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.run_folder import RunFolder
from mlbench_cli.runs.repeats import is_sealed, runs_named
from mlbench_cli.store import Store


def find_archives(words: Sequence[str], store: Store) -> list[Path]:
    """The archives that words name (runs, experiments, folders, zips), each once; without words those of all runs.

    Of experiments those of runs that have ended. Raises NotFoundError, or UsageError if none has.
    """
    if not words:
        found = [row.run.folder for row in store.runs() if is_sealed(row.run)]
        if not found:
            raise NotFoundError("There are no finished runs.", hint="mlbench run NAME 1 2 --task TASK")
        return found
    return list(dict.fromkeys(path for word in words for path in _find_by_name(word, store)))


def as_archive_path(word: str) -> Path | None:
    """The path that a word with "/" or ".zip" is; None for a name. Raises NotFoundError if nothing is there."""
    path = Path(word)
    if "/" not in word and path.suffix != ".zip":
        return None
    if not path.exists():
        raise NotFoundError(f"There is no archive {word}.", hint="mlbench download NAME --to FILE")
    return path


def _find_by_name(word: str, store: Store) -> list[Path]:
    if (given := as_archive_path(word)) is not None:
        return [given]
    path = Path(word)
    try:
        runs = runs_named(store, word)
    except NotFoundError:
        if RunFolder(path).is_sealed:
            return [path]
        raise
    if len(runs) == 1:
        return [results_of(runs[0])]
    ended = [run.folder for run in runs if is_sealed(run)]
    if not ended:
        raise UsageError(f"No run of {word} has results yet.", hint=f"mlbench wait {word}")
    if len(ended) < len(runs):
        console.warn(f"{len(runs) - len(ended)} of {len(runs)} runs of {word} have no results yet and are left out.")
    return ended


def find_archives_below(folder: Path) -> list[Path]:
    """The archives in a folder: itself, or its zips and sealed folders, sorted by name."""
    if RunFolder(folder).is_sealed:
        return [folder]
    return sorted(path for path in folder.iterdir() if path.suffix == ".zip" or RunFolder(path).is_sealed)
