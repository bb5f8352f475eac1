"""A rank's log page by page, by byte offsets, so that a log of any size costs one page of memory."""

from dataclasses import asdict, dataclass
from pathlib import Path

from mlbench_cli.model import JsonObject
from task_images import contract

PAGE_BYTES = 64 * 1024
MAX_LINE_BYTES = 1 << 20  # a longer line is cut into several
MAX_LINE = 4000  # characters of a line that are shown
_EVENT = contract.PREFIX.encode()


@dataclass(frozen=True)
class LogPage:
    """Whole lines from `offset` to `end`, in bytes of the log. `before` is the offset of the page before it."""

    offset: int
    end: int
    size: int
    before: int | None
    lines: tuple[str, ...]

    def to_dict(self) -> JsonObject:
        """The page as the REST API gives it."""
        return asdict(self)


def read_page(path: Path, offset: int, *, raw: bool = False, limit: int = PAGE_BYTES) -> LogPage:
    """The page that begins at the first line at or behind `offset`; -1 means the last page. A file that is not there
    is empty."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - limit) if offset < 0 else min(offset, size)
            start = _line_start(file.seek(max(0, start - 1)), start, file.readline() if start else b"")
            file.seek(start)
            data = file.read(limit)
            if b"\n" not in data:  # a line that is longer than the page
                data += file.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return LogPage(0, 0, 0, None, ())
    end = start + len(data)
    if end < size and (cut := data.rfind(b"\n") + 1):
        data, end = data[:cut], start + cut
    lines = tuple(text for line in data.splitlines() if (text := _show(line, raw)) is not None)
    return LogPage(start, end, size, max(0, start - limit) if start else None, lines)


def _line_start(at: int, start: int, skipped: bytes) -> int:
    """The beginning of the first whole line at or behind `start`; `skipped` is the rest of the line from `at` on."""
    if start == 0 or skipped == b"\n":
        return start
    return at + len(skipped)


def _show(line: bytes, raw: bool) -> str | None:
    """A line as text; None for one that holds only an event."""
    if not raw and _EVENT in line and contract.parse_event(line) is not None:
        before = line[: line.find(_EVENT)].rstrip()
        if not before:
            return None
        line = before
    text = line.decode("utf-8", "replace")
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}… ({len(text)} characters)"
