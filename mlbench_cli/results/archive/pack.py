"""Packs an archive into a zip, and unpacks it. The zip is canonical: equal contents give equal bytes on every
machine."""

import io
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.results.archive import files as zips
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.storage import run_folder
from mlbench_cli.util import files


def pack(folder: Path, target: Path) -> None:
    """Write a sealed folder as a canonical zip to `target`, which appears only when complete.

    Raises DamagedArchive if a file is not what was sealed.
    """
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", hint=f"Give a file name, for example {target / 'results.zip'}.")
    archive = Archive.open(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is already packed.", hint=f"cp {folder} {target}")
    sums = layout.parse_sums(archive.read(run_folder.SUMS, layout.MAX_SUMS_BYTES), folder)
    for name in sorted(set(archive.names) - {run_folder.SIGNATURE} ^ {*sums, run_folder.SUMS}):
        missing = name in sums
        message = "it is missing" if missing else "it is not part of the sealed archive"
        raise DamagedArchive(folder, name, message, problem="missing" if missing else "extra")
    write_zip(archive, target, {}, sums)


def write_zip(
    archive: Archive, target: Path, changes: Mapping[str, bytes], sums: Mapping[str, str] | None = None
) -> None:
    """Write the files of `archive`, replaced or supplemented by those of `changes`, as a canonical zip.

    Raises DamagedArchive for a file whose SHA-256 differs from that in `sums`, if listed there.
    """
    with layout.naming_file_on_os_error(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_file(target) as file:
            digests = zips.write_zip(file, _contents(archive, changes), archive.path)
            for name, expected in (sums or {}).items():
                if digests.get(name) != expected:
                    message = "it has changed since it was sealed"
                    raise DamagedArchive(archive.path, name, message, problem="changed")
        files.sync_folder(target.parent)


def _contents(archive: Archive, changes: Mapping[str, bytes]) -> Iterator[tuple[str, int, BinaryIO]]:
    for name in sorted({*archive.names, *changes}):
        if name in changes:
            yield name, len(changes[name]), io.BytesIO(changes[name])
        else:
            yield name, archive.size(name), archive.open_file(name)


def unpack(path: Path, folder: Path) -> None:
    """Write the files of a verified zip to `folder`, which must be new or empty, and appears only when complete."""
    with open_verified(path) as archive, layout.naming_file_on_os_error(folder, "written"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not empty.", hint="Give the name of a new folder.")
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        temporary.mkdir(parents=True)
        try:
            for name in archive.names:
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open_file(name) as source, open(target, "wb") as copy:
                    shutil.copyfileobj(source, copy, layout.CHUNK)
                    copy.flush()
                    os.fsync(copy.fileno())
            os.replace(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        files.sync_folder(folder.parent)
