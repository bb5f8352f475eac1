"""Archives in folders, and one file with those of several runs: a zip that holds the zip of each, as it is."""

import atexit
import os
import shlex
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mlbench_cli.errors import DamagedArchive, UsageError, naming_file_on_os_error
from mlbench_cli.results.archive.files import UNREADABLE, open_zip
from mlbench_cli.storage.run_folder import RUN, SUMS
from mlbench_cli.util.files import replace_file
from mlbench_cli.util.text import counted, one_line

PIECE = 1 << 20
MAX_DEPTH = 200  # of a folder in which archives are looked for
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # no time of packing: the same archives give the same file
_unpacked: dict[Path, str] = {}  # path -> "FILE.zip/NAME.zip"


def write_bundle(archives: Sequence[Path], target: Path) -> None:
    """Pack zip files of archives, which keep their names. `target` appears when it is complete. Raises MlbenchError."""
    with naming_file_on_os_error(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as bundle:
            for path in archives:
                entry = zipfile.ZipInfo(path.name, _ZIP_EPOCH)
                with path.open("rb") as source, bundle.open(entry, "w", force_zip64=True) as stored:
                    shutil.copyfileobj(source, stored, PIECE)


def is_zip_name(path: str | Path) -> bool:
    """Whether a file has the name of a zip; some systems write it in capitals."""
    return Path(path).suffix.lower() == ".zip"


def list_bundle(path: Path) -> list[str]:
    """The names of the archives in a file that holds those of several runs; empty for any other file."""
    try:
        if not path.is_file():  # a pipe, for one, would be waited for
            return []
        with open(path, "rb") as file, open_zip(file) as bundle:
            names = bundle.namelist()
    except (OSError, *UNREADABLE):
        return []
    return names if all(is_zip_name(name) for name in names) else []


def unpack_bundle(path: Path) -> list[Path]:
    """The archives of a bundle as files that exist until this process ends. Raises DamagedArchive."""
    folder = Path(tempfile.mkdtemp(prefix="mlbench-bundle-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = []
    with open(path, "rb") as stream, open_zip(stream) as bundle:
        room = path.stat().st_size
        for entry in bundle.infolist():
            target = folder / entry.filename
            room -= entry.file_size
            # Plain new names lead nowhere else, and all of them together are no larger than the file.
            is_plain = target.parent == folder and "\0" not in entry.filename and not target.exists()
            if entry.compress_type != zipfile.ZIP_STORED or not is_plain or room < 0:
                raise DamagedArchive(path, entry.filename, "it is not stored as mlbench download does")
            try:
                with bundle.open(entry) as stored, target.open("xb") as file:
                    shutil.copyfileobj(stored, file, PIECE)
            except (OSError, *UNREADABLE) as error:
                raise DamagedArchive(path, entry.filename, f"it cannot be read: {error}") from None
            _unpacked[target] = f"{path}/{entry.filename}"
            found.append(target)
    return found


def archives_at(path: Path) -> list[Path]:
    """The archive at a path, or those in one file of several runs (mlbench download EXPERIMENT --to FILE.zip).

    A file that another program packed again is given back, so that it is refused by its name, and hides no other.
    """
    if is_zip_name(path) and list_bundle(path):
        with suppress(DamagedArchive):
            return unpack_bundle(path)
    return [path]


def walk(folder: Path, skipped: Path | None = None) -> Iterator[Path]:
    """The sealed folders below a folder, and the files outside of runs.

    Hidden names ("._a.zip" is what macOS puts beside a.zip), links to folders and `skipped`, an absolute path, are left
    out.
    """
    for place, names, files in os.walk(folder):
        here = Path(place)
        if SUMS in files:
            yield here
        if SUMS in files or RUN in files:
            names.clear()
            continue
        if len(here.absolute().parts) > MAX_DEPTH:  # which os.walk would follow down until Python gives up
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith(".") and here.absolute() / name != skipped)
        yield from (here / name for name in sorted(files) if not name.startswith("."))


def refuse_bundle(path: Path, purpose: str) -> None:
    """Raise UsageError if a file holds archives of several runs where `purpose` takes one."""
    if is_zip_name(path) and (names := list_bundle(path)):
        raise UsageError(
            f"{path} holds the archives of {counted(len(names), 'run')}; {purpose} takes those of single runs.",
            hint=f"Take one out of it: python3 -m zipfile -e {shlex.quote(str(path))} FOLDER, then use "
            f"FOLDER/{one_line(names[0])}",
        )


def name_archive(path: Path) -> str:
    """The name of an archive for people: its path, or its place in a bundle."""
    return _unpacked.get(path, str(path))
