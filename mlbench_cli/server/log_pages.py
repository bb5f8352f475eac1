"""Pages of a rank's log by byte offset, so a log of any size takes one page of memory."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from mlbench_cli.model.run import JsonObject
from mlbench_cli.util.text import clean
from task_images import contract

PAGE_BYTES = 64 * 1024
MAX_LINE_BYTES = 1 << 20  # a longer line is cut into several
_LINE_END = re.compile(rb"\r\n|\n|\r")
MAX_LINE = 4000  # displayed characters of a line
_EVENT = contract.PREFIX.encode()


@dataclass(frozen=True)
class LogPage:
    """Lines from `offset` to `end`, in bytes of the log. `before` is the offset of the page before it. `cut` is where
    the last line begins if it is still incomplete, else None."""

    offset: int
    end: int
    size: int
    before: int | None
    lines: tuple[str, ...]
    cut: int | None = None

    def to_dict(self) -> JsonObject:
        """The page as a document of the REST API."""
        return asdict(self)


def read_page(path: Path, offset: int, *, raw: bool = False, limit: int = PAGE_BYTES) -> LogPage:
    """The page that starts at the first line at or after `offset`; -1 is the last page. A missing file is empty.

    A progress bar's "\\r" ends a line, too. A page costs `limit` + MAX_LINE_BYTES of memory, whatever the log holds:
    longer lines are cut, and a page may begin inside of one.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            start = _find_start(file, max(0, size - limit) if offset < 0 else min(offset, size), limit)
            file.seek(start)
            data = file.read(limit)
            cut = _last_line_end(data)
            if not cut and start + len(data) < size:  # the line is longer than the page
                data += file.read(MAX_LINE_BYTES)
                found = _LINE_END.search(data)
                cut = found.end() if found else len(data)
            if start + len(data) < size:
                data = data[:cut]
                if data.endswith(b"\r") and _byte_at(file, start + len(data)) == b"\n":
                    data += b"\n"
    except FileNotFoundError:
        return LogPage(0, 0, 0, None, ())
    lines = tuple(text for line in data.splitlines() if (text := _show(line, raw)) is not None)
    whole = _last_line_end(data)
    is_open = whole < len(data) and start + len(data) == size and _show(data[whole:], raw) is not None
    before = max(0, start - limit) if start else None
    return LogPage(start, start + len(data), size, before, lines, start + whole if is_open else None)


def _find_start(file: BinaryIO, start: int, limit: int) -> int:
    """The start of the first line at or after `start`; `start` itself inside a line that is too long to skip."""
    before = _byte_at(file, start - 1) if start else b"\n"
    if before in (b"\n", b"\r"):
        return start + (before == b"\r" and _byte_at(file, start) == b"\n")
    back = min(start, MAX_LINE_BYTES)
    file.seek(start - back)
    if back < start and not _last_line_end(file.read(back)):
        return start
    file.seek(start)
    # Less than a page, so the previous page starts before this one.
    found = _LINE_END.search(file.read(limit - 2))
    if found is None:
        return start
    start += found.end()
    return start + (found[0] == b"\r" and _byte_at(file, start) == b"\n")


def _byte_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(1)


def _last_line_end(data: bytes) -> int:
    """The offset after the last newline in `data`; 0 without one."""
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1


def _show(line: bytes, raw: bool) -> str | None:
    """A line as text; None for an event line. Unless `raw`, control characters are escaped."""
    if not raw and _EVENT in line and contract.parse_event(line) is not None:
        before = line[: line.find(_EVENT)].rstrip()
        if not before:
            return None
        line = before
    text = line.decode("utf-8", "replace")
    if not raw:
        text = clean(text, keep="\t")
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}… ({len(text)} characters)"
