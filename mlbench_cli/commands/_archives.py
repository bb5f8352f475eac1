"""The archives that a command presents: verified first, and marked if something in them is unproven."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import one_of
from mlbench_cli.errors import DamagedArchive, MlbenchError, UnprovenArchive
from mlbench_cli.model.spec import common_name
from mlbench_cli.results.analysis.comparability import WORDS
from mlbench_cli.results.archive.bundle import is_zip_name, name_archive
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.util.files import allow_open_files

SPARE_FILES = 100  # for all else that a command opens

Unproven = Annotated[
    bool,
    typer.Option("--unproven", help="also show results that do not all follow from their evidence, marked (unproven)"),
]

Across = Annotated[
    list[str] | None,
    typer.Option(
        "--across",
        metavar="WORD",
        help=f"accept a difference; may be repeated: {', '.join(WORDS)}",
        autocompletion=one_of(*WORDS),
    ),
]


def open_archives(
    paths: Iterable[Path], stack: ExitStack, *, unproven: bool = False, left_out: list[str] | None = None
) -> list[Archive]:
    """The verified archives at `paths`, closed with `stack`. With `unproven` also those that only checksums vouch for;
    a warning says why each is.

    With `left_out`, for runs that nobody named one by one, an archive that is refused does not hide the others: it gets
    a warning and a sentence in that list. If none remains, the first refusal is raised.
    """
    paths = list(paths)
    allow_open_files(len(paths) + SPARE_FILES)  # each zip stays open
    opened: list[Archive] = []
    refusal: MlbenchError | None = None
    for path in console.track("Verifying", paths):
        try:
            archive = stack.enter_context(open_verified(path, unproven=unproven))
        except (DamagedArchive, UnprovenArchive) as error:
            _name_bundle(error, path)
            if left_out is None:
                raise
            refusal = refusal or error
            word = "damaged" if isinstance(error, DamagedArchive) else "unproven"
            left_out.append(f"left out, {word}: {error.message}")
            console.warn(left_out[-1])
            continue
        opened.append(archive)
        if archive.not_derived:
            console.warn(f"{name_archive(path)} is unproven. {' '.join(archive.not_derived)}")
    if refusal is not None and not opened:
        raise refusal
    _warn_of_missing_repeats(opened)
    return opened


def _name_bundle(error: MlbenchError, path: Path) -> None:
    """Let an error about an archive in a file of several name that file, instead of where it was unpacked."""
    name = name_archive(path)
    error.message = error.message.replace(str(path), name)
    if error.hint and name != str(path):
        error.hint = error.hint.replace(str(path), name.rpartition("/")[0])


def tell_apart(archives: Sequence[Archive]) -> Sequence[Archive]:
    """The archives, called by name and place where several runs have one name: "first-1 (anna.zip)" of ten people who
    named their runs alike."""
    places: dict[str, dict[str, Path]] = {}  # name -> id -> file or folder
    for archive in archives:
        whole = Path(name_archive(Path(archive.path)))
        place = next((parent for parent in whole.parents if is_zip_name(parent)), whole)
        places.setdefault(archive.run["name"], {})[archive.run["id"]] = place
    for archive in archives:
        same = places[archive.run["name"]]
        if len(same) > 1:
            place, names = same[archive.run["id"]], [path.name for path in same.values()]
            archive.name += f" ({place.name if names.count(place.name) == 1 else place})"
    return archives


def _warn_of_missing_repeats(archives: Iterable[Archive]) -> None:
    """Warn if only some of the repeats that were requested together are present."""
    asked: dict[str, int] = {}
    there: dict[str, set[str]] = {}
    for archive in archives:
        name = archive.run["name"]
        base = common_name(name) or name
        asked[base] = max(asked.get(base, 0), int(archive.run.get("repeats") or 0))
        there.setdefault(base, set()).add(name)
    for base, names in there.items():
        if 1 < len(names) < asked[base]:
            console.warn(f"{base}: {len(names)} of the {asked[base]} runs that were asked for are here.")
