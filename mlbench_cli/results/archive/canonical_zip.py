"""Canonical zip files: every byte is determined by the names and contents of the files.

Entries are sorted by name and stored uncompressed; timestamps, attributes and versions are constants; there are no
comments, gaps or optional fields. Equal contents therefore give equal bytes on every machine, and a reader that
rebuilds the headers detects every flipped bit in them. Any unzip program can read the files.

Layout and constants follow PKWARE's APPNOTE 6.3.10, sections 4.3.7, 4.3.12, 4.3.14-16 and 4.5.3. Zip64 fields are used
only if a number does not fit otherwise.
"""

import os
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from mlbench_cli.results.archive.layout import CHUNK, MAX_FILES, MAX_NAME_BYTES, find_name_problem

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR = struct.Struct("<IIQI")
_LOCAL_MARK, _CENTRAL_MARK, _END_MARK, _END64_MARK, _LOCATOR_MARK = (
    0x04034B50,
    0x02014B50,
    0x06054B50,
    0x06064B50,
    0x07064B50,
)
_FULL32, _FULL16 = 0xFFFFFFFF, 0xFFFF
_UTF8_FLAG, _ENCRYPTED_FLAG = 0x800, 0x1
_DATE = (1 << 5) | 1  # 1980-01-01, the earliest date of the format
_UNIX = 3 << 8
_ATTRIBUTES = (stat.S_IFREG | 0o644) << 16


class ZipDamage(ValueError):
    """The file is not a canonical zip. `code` as in `verify.Problem`; `name`: the entry, or ""."""

    def __init__(self, code: str, name: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.name = name


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file: size in bytes, CRC-32, and the offset of its local header."""

    name: str
    size: int
    crc: int
    offset: int

    @property
    def data_offset(self) -> int:
        """The offset of the file's first byte in the zip."""
        return self.offset + len(local_header(self))


class Writer:
    """Writes a canonical zip to a seekable file: `add` every file, sorted by name, then `finish`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._entries: list[Entry] = []

    def add(self, name: str, size: int, chunks: Iterator[bytes]) -> None:
        """Store a file of exactly `size` bytes. Raises ZipDamage if it is longer or shorter."""
        start, crc, written = self._file.tell(), 0, 0
        self._file.write(local_header(Entry(name, size, 0, start)))
        for chunk in chunks:
            crc = zlib.crc32(chunk, crc)
            written += len(chunk)
            self._file.write(chunk)
        if written != size:
            raise ZipDamage("changed", name, f"it changed from {size} to {written} bytes while it was read")
        entry = Entry(name, size, crc, start)
        end = self._file.tell()
        self._file.seek(start)
        self._file.write(local_header(entry))
        self._file.seek(end)
        self._entries.append(entry)

    def finish(self) -> None:
        """Write the central directory, which ends the zip."""
        for piece in directory(self._entries, self._file.tell()):
            self._file.write(piece)


def read_entries(file: BinaryIO) -> list[Entry]:
    """The entries of a canonical zip. Checks every byte of the headers, but does not read data, so CRCs are not
    checked.

    Raises ZipDamage. Memory is bounded by MAX_FILES entries for any file.
    """
    total = file.seek(0, os.SEEK_END)
    entries: list[Entry] = []
    offset = 0
    while True:
        file.seek(offset)
        mark = file.read(4)
        if mark != _LOCAL_MARK.to_bytes(4, "little"):
            break
        entry = _read_local(file, offset, total)
        if entries and entry.name <= entries[-1].name:
            duplicate = entry.name == entries[-1].name
            raise ZipDamage(
                "duplicate" if duplicate else "order", entry.name, "it appears twice" if duplicate else "out of order"
            )
        if len(entries) >= MAX_FILES:
            raise ZipDamage("too_large", "", f"more than {MAX_FILES} files")
        entries.append(entry)
        offset = entry.data_offset + entry.size
    if not entries:
        raise ZipDamage("not_an_archive", "", "it does not start like a zip file" if total else "it is empty")
    _check_directory(file, entries, offset, total)
    return entries


def read_data(file: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """The entry's data in chunks. Raises ZipDamage at the end if the CRC-32 is wrong."""
    at, crc = entry.data_offset, 0
    end = at + entry.size
    while at < end:
        file.seek(at)  # before each chunk, because several entries may be read alternately
        chunk = file.read(min(CHUNK, end - at))
        if not chunk:
            raise ZipDamage("truncated", entry.name, "the file ends within it")
        crc = zlib.crc32(chunk, crc)
        at += len(chunk)
        yield chunk
    if crc != entry.crc:
        raise ZipDamage("changed", entry.name, "its CRC-32 is wrong")


def local_header(entry: Entry) -> bytes:
    """The bytes before a file's content, with a Zip64 field from 4 GiB (APPNOTE.TXT 4.3.7)."""
    name, flags = _name(entry)
    big = entry.size >= _FULL32
    extra = struct.pack("<HHQQ", 1, 16, entry.size, entry.size) if big else b""
    size = _FULL32 if big else entry.size
    fixed = _LOCAL.pack(_LOCAL_MARK, _version(big), flags, 0, 0, _DATE, entry.crc, size, size, len(name), len(extra))
    return fixed + name + extra


def directory(entries: Sequence[Entry], start: int) -> Iterator[bytes]:
    """The central directory at offset `start`, and the end records, in pieces."""
    length = 0
    for entry in entries:
        piece = _central_header(entry)
        length += len(piece)
        yield piece
    count, far = len(entries), max(length, start) >= _FULL32
    if far or count >= _FULL16:
        yield _END64.pack(_END64_MARK, _END64.size - 12, _UNIX | 45, 45, 0, 0, count, count, length, start)
        yield _LOCATOR.pack(_LOCATOR_MARK, 0, start + length, 1)
    short = min(count, _FULL16)
    yield _END.pack(_END_MARK, 0, 0, short, short, min(length, _FULL32), min(start, _FULL32), 0)


def _central_header(entry: Entry) -> bytes:
    name, flags = _name(entry)
    big, far = entry.size >= _FULL32, entry.offset >= _FULL32
    numbers = [entry.size, entry.size] * big + [entry.offset] * far
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    size = _FULL32 if big else entry.size
    version = _version(big or far)
    fixed = _CENTRAL.pack(
        *(_CENTRAL_MARK, _UNIX | version, version, flags, 0, 0, _DATE, entry.crc, size, size),
        *(len(name), len(extra), 0, 0, 0, _ATTRIBUTES, _FULL32 if far else entry.offset),
    )
    return fixed + name + extra


def _read_local(file: BinaryIO, offset: int, total: int) -> Entry:
    file.seek(offset)
    fixed = file.read(_LOCAL.size)
    if len(fixed) < _LOCAL.size:
        raise ZipDamage("truncated", "", f"it ends within a header, at byte {total}")
    _, _, flags, method, _, _, crc, _, size, name_length, extra_length = _LOCAL.unpack(fixed)
    if name_length > MAX_NAME_BYTES:
        raise ZipDamage("unsafe_name", "", f"at byte {offset}: a name of {name_length} bytes")
    raw = file.read(name_length)
    extra = file.read(extra_length)
    name = raw.decode("utf-8", "replace")
    if len(raw) < name_length or len(extra) < extra_length:
        raise ZipDamage("truncated", name, f"it ends within a header, at byte {total}")
    if flags & _ENCRYPTED_FLAG:
        raise ZipDamage("encrypted", name, "it is encrypted")
    if method:
        raise ZipDamage("compressed", name, f"it is compressed (method {method}); archives store files uncompressed")
    if trouble := find_name_problem(name):
        raise ZipDamage("unsafe_name", name, trouble)
    if len(extra) == 20 and size == _FULL32:
        size = struct.unpack_from("<Q", extra, 4)[0]
    entry = Entry(name, size, crc, offset)
    header = local_header(entry)
    if fixed + raw + extra != header:
        raise ZipDamage("header", name, f"its header at byte {offset} is not in the canonical form")
    if offset + len(header) + size > total:
        raise ZipDamage("truncated", name, f"{size} bytes are declared, but {total - offset - len(header)} are present")
    return entry


def _check_directory(file: BinaryIO, entries: Sequence[Entry], start: int, total: int) -> None:
    at = start
    for index, piece in enumerate(directory(entries, start)):
        file.seek(at)
        found = file.read(len(piece))
        name = entries[index].name if index < len(entries) else ""
        if len(found) < len(piece) and piece.startswith(found):
            raise ZipDamage("truncated", name, f"the zip directory ends early, at byte {total}")
        if found != piece:
            raise ZipDamage(*_directory_trouble(found, name, at))
        at += len(piece)
    if at != total:
        raise ZipDamage("trailing_data", "", f"{total - at} bytes follow the end of the zip")


def _directory_trouble(found: bytes, name: str, at: int) -> tuple[str, str, str]:
    if len(found) >= _CENTRAL.size and found[:4] == _CENTRAL_MARK.to_bytes(4, "little"):
        mode = _CENTRAL.unpack_from(found)[15] >> 16
        if stat.S_ISLNK(mode):
            return "link", name, "it is a symbolic link"
    return "header", name, f"the zip's directory at byte {at} does not agree with its entries"


def _name(entry: Entry) -> tuple[bytes, int]:
    raw = entry.name.encode()
    return raw, 0 if raw.isascii() else _UTF8_FLAG


def _version(wide: bool) -> int:
    return 45 if wide else 20
