"""Where an archive's files are: a folder, or a canonical zip.

A canonical zip is what `write_zip` writes: entries sorted by name, stored uncompressed, with constant dates and
attributes. Equal contents give equal bytes on every machine, and any unzip program can read them. `Zip.check` writes
the zip again and compares, so it finds every flipped bit.
"""

import hashlib
import io
import os
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.results.archive import layout

ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date of the format, of every entry: equal contents give equal bytes
_ATTRIBUTES = (stat.S_IFREG | 0o644) << 16
_UNIX = 3
_ENCRYPTED = 1  # flag of an entry
_ENTRY_MARK = b"PK\1\2"
# What zipfile raises for bytes that are not a zip, besides OSError.
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError, struct.error)


class Folder:
    """An archive in a folder; `names` are those of regular files, sorted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.names = tuple(sorted(name for name, mode in layout.walk(path) if stat.S_ISREG(mode)))

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        return open(self._path / name, "rb")

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        return (self._path / name).stat().st_size

    def close(self) -> None:
        """Does nothing."""


class Zip:
    """An archive in a seekable file. Raises DamagedArchive. Only `check` reads all of its bytes."""

    def __init__(self, file: BinaryIO, path: Path | str) -> None:
        self._file, self._path = file, path
        self._size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(4)
        if head != b"PK\3\4":
            raise self._damage("not_an_archive", "", "it does not start like a zip file" if head else "it is empty")
        directory = _Directory(file)
        try:
            self._zip = zipfile.ZipFile(cast(BinaryIO, directory))
        except _UNREADABLE as error:
            if directory.is_too_large:
                raise self._damage("too_large", "", f"more than {layout.MAX_FILES} files") from None
            raise self._damage("truncated", "", f"the zip directory is missing or incomplete: {error}") from None
        except OSError as error:
            raise self._damage("truncated", "", f"the zip directory cannot be read: {error}") from None
        directory.is_read = True
        self._entries = {entry.orig_filename: entry for entry in self._zip.infolist()}
        self.names = tuple(self._entries)
        self._check_entries()

    def _damage(self, code: str, name: str, message: str) -> DamagedArchive:
        return DamagedArchive(self._path, name, message, problem=code)

    def _check_entries(self) -> None:
        before, room = "", self._size
        for entry in self._zip.infolist():
            name = entry.orig_filename
            if name <= before:
                twice = name == before
                raise self._damage(
                    "duplicate" if twice else "order", name, "it appears twice" if twice else "it is not sorted"
                )
            before, room = name, room - entry.compress_size
            if entry.flag_bits & _ENCRYPTED:
                raise self._damage("encrypted", name, "it is encrypted")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise self._damage("compressed", name, "it is compressed; archives store files uncompressed")
            if trouble := layout.find_name_problem(name):
                raise self._damage("unsafe_name", name, trouble)
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise self._damage("link", name, "it is a symbolic link")
            if room < 0:
                raise self._damage("truncated", name, f"more bytes are declared than the zip has ({self._size})")

    def open(self, name: str) -> BinaryIO:
        """Open an entry for reading; its CRC-32 is checked at its end."""
        return cast(BinaryIO, io.BufferedReader(_Entry(self._zip, self._entries[name]), 1 << 16))

    def size(self, name: str) -> int:
        """The size of an entry in bytes."""
        return self._entries[name].file_size

    def check(self) -> dict[str, str]:
        """Compare every byte with the canonical zip of the same files. Returns the hex SHA-256 of each file."""
        copy = _Comparison(self._file)
        name = ""

        def contents() -> Iterator[tuple[str, int, BinaryIO]]:
            nonlocal name
            for name in self.names:
                yield name, self.size(name), self.open(name)
                if copy.differing:  # a hostile zip is not read any further
                    return

        try:
            digests = write_zip(cast(BinaryIO, copy), contents(), self._path)
        except OSError as error:
            raise self._damage("changed", name, f"it cannot be read: {error.strerror or error}") from None
        if copy.differing:
            at = min(copy.differing)
            raise self._damage("header", name, f"it is not in canonical form, from byte {at}")
        if copy.end != self._size:
            raise self._damage("trailing_data", "", f"{self._size - copy.end} bytes follow the end of the zip")
        return digests

    def close(self) -> None:
        """Close the zip's file."""
        self._zip.close()
        self._file.close()


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


class _Directory:
    """A zip's file for zipfile, which reads a directory of the size that the zip declares, and has no limit for it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable
        self.is_read = self.is_too_large = False

    def read(self, size: int = -1) -> bytes:
        """Raises ValueError for a directory of more bytes or files than that of an archive."""
        self.is_too_large = size > layout.MAX_SUMS_BYTES
        data = b"" if self.is_too_large else self._file.read(size)
        self.is_too_large |= not self.is_read and data.count(_ENTRY_MARK) > layout.MAX_FILES
        if self.is_too_large:
            raise ValueError("it is too large")
        return data


class _Entry(io.RawIOBase):
    """One entry of a zip as a stream. Raises OSError, also for a wrong CRC-32."""

    def __init__(self, zipped: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        self._zip, self._entry = zipped, entry
        self._data: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._data = self._data or self._zip.open(self._entry)
            return int(self._data.readinto(buffer))
        except _UNREADABLE as error:
            raise OSError(str(error)) from None


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
