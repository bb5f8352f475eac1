"""Packs an archive into a canonical zip: entries sorted by name, uncompressed, with constant dates and attributes.

Equal contents give equal bytes on every machine, and any unzip program can read them. `check_canonical` writes the zip
again and compares, so it finds every flipped bit.
"""

import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlbench_cli.errors import DamagedArchive, UsageError
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.files import Archive, Zip
from mlbench_cli.storage import run_folder
from mlbench_cli.util import files

ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of the format, of every entry: equal contents give equal bytes
_ATTRIBUTES = (stat.S_IFREG | 0o644) << 16
_UNIX = 3


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
    write_archive(archive, target, {}, sums)


def write_archive(
    archive: Archive, target: Path, changes: Mapping[str, bytes], sums: Mapping[str, str] | None = None
) -> None:
    """Write the files of `archive`, replaced or supplemented by those of `changes`, as a canonical zip.

    Raises DamagedArchive for a file whose SHA-256 differs from that in `sums`, if listed there.
    """
    with layout.naming_file_on_os_error(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.replace_file(target) as file:
            digests = write_zip(file, _contents(archive, changes), archive.path)
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


def write_zip(target: BinaryIO, contents: Iterable[tuple[str, int, BinaryIO]], path: Path | str) -> dict[str, str]:
    """Write a canonical zip of the files in `contents` (name, size, data), which are sorted by name. Returns the hex
    SHA-256 of each file. Raises DamagedArchive, with `path`, if one is longer or shorter than it was to be.

    zipfile in Python 3.11 to 3.14 writes the same bytes, except of a file of 2.0 to 2.1 GiB.
    """
    digests = {}
    with zipfile.ZipFile(target, "w") as zipped:
        for name, size, source in contents:
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.create_system, entry.external_attr, entry.file_size = _UNIX, _ATTRIBUTES, size
            sha, written = hashlib.sha256(), 0
            with source, zipped.open(entry, "w") as stored:
                while written <= size and (chunk := source.read(layout.CHUNK)):
                    written += len(chunk)
                    sha.update(chunk)
                    stored.write(chunk)
            if written != size:
                message = f"it changed from {size} to {written} bytes while it was read"
                raise DamagedArchive(path, name, message, problem="changed")
            digests[name] = sha.hexdigest()
    return digests


def check_canonical(zipped: Zip) -> dict[str, str]:
    """Compare every byte with the canonical zip of the same files. Returns the hex SHA-256 of each file."""
    copy = _Comparison(zipped.file)
    name = ""

    def contents() -> Iterator[tuple[str, int, BinaryIO]]:
        nonlocal name
        for name in zipped.names:
            yield name, zipped.size(name), zipped.open_file(name)
            if copy.differing:  # a hostile zip is not read any further
                return

    try:
        digests = write_zip(cast(BinaryIO, copy), contents(), zipped.path)
    except OSError as error:
        message = f"it cannot be read: {error.strerror or error}"
        raise DamagedArchive(zipped.path, name, message, problem="changed") from None
    if copy.differing:
        message = f"it is not in canonical form, from byte {min(copy.differing)}"
        raise DamagedArchive(zipped.path, name, message, problem="header")
    if copy.end != zipped.file_size:
        message = f"{zipped.file_size - copy.end} bytes follow the end of the zip"
        raise DamagedArchive(zipped.path, "", message, problem="trailing_data")
    return digests


class _Comparison(io.RawIOBase):
    """Takes what zipfile writes, and notes in `differing` where it is not what the file has.

    zipfile writes an entry's header twice: before its data, and with the CRC-32 after them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = self.end = 0
        self.differing: set[int] = set()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset
        return offset

    def write(self, data: Any) -> int:
        self._file.seek(self._at)
        if self._file.read(len(data)) == data:
            self.differing.discard(self._at)
        else:
            self.differing.add(self._at)
        self._at += len(data)
        self.end = max(self.end, self._at)
        return len(data)
