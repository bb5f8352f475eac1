"""From names of runs and experiments, and paths, to archives."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.archive.bundle import archives_at, is_zip_name, walk
from mlbench_cli.runs.select import find
from mlbench_cli.storage.run_folder import RUN, is_sealed
from mlbench_cli.storage.store import Store


def find_archives(words: Sequence[str], store: Store, notice: Callable[[str], None] | None = None) -> list[Path]:
    """The archives of named runs, experiments, folders and zips, each once; without names those of all runs.

    For experiments only runs that have ended count; `notice` is called about the others. Raises NotFoundError, or
    UsageError if none has ended.
    """
    if not words:
        found = [row.run.folder for row in store.runs() if is_sealed(row.run)]
        if not found:
            raise NotFoundError("There are no finished runs.", hint="mlbench run NAME 1 2 --task TASK")
        return found
    return list(dict.fromkeys(path for word in words for path in _find_by_name(word, store, notice)))


def as_archive_path(word: str) -> Path | None:
    """A word with "/" or ".zip" as a path; None for a name. Raises NotFoundError if nothing is there."""
    path = Path(word)
    if "/" not in word and not is_zip_name(path):
        return None
    if not path.exists():
        raise NotFoundError(f"There is no archive {word}.", hint="mlbench download NAME --to FILE")
    return path


def find_archives_below(folder: Path) -> list[Path]:
    """The archives in a folder and below it, sorted by name. Raises NotFoundError."""
    paths = [path for path in walk(folder) if path.is_dir() or is_zip_name(path)]
    found = [archive for path in paths for archive in archives_at(path)]
    if not found:
        raise NotFoundError(f"There is no archive in {folder}.", hint="mlbench download NAME --to FOLDER/NAME.zip")
    return found


def find_at(path: Path) -> list[Path]:
    """The archive at a path, or those in a folder or in one file of several runs."""
    return find_archives_below(path) if path.is_dir() and not (path / RUN).exists() else archives_at(path)


def _find_by_name(word: str, store: Store, notice: Callable[[str], None] | None) -> list[Path]:
    if (given := as_archive_path(word)) is not None:
        return find_at(given)
    try:
        rows, _ = find(store, word, repeats=True)
    except NotFoundError:
        if Path(word).is_dir():
            return find_at(Path(word))
        raise
    ended = [row.run.folder for row in rows if is_sealed(row.run)]
    if not ended:
        what = f'The run "{word}" has no results yet.' if len(rows) == 1 else f"No run of {word} has results yet."
        raise UsageError(what, hint=f"mlbench wait {word}")
    if len(ended) < len(rows) and notice is not None:
        notice(f"{len(rows) - len(ended)} of {len(rows)} runs of {word} have no results yet and are omitted.")
    return ended
