"""Text for people: width on a terminal, escaping of untrusted text, formatting of numbers and durations."""

import math
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

_WORKFLOW_COMMAND = re.compile(r"(^\s*|#)(::|#\[)", re.MULTILINE)

# "Next: mlbench ...", without further words for people behind it
_COMMAND = re.compile(r"(?:Next|Repeat|The same without prompts): mlbench (?:(?!   |, ).)*$")
_WORDS = re.compile(r"\s*(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")
# Control and format characters, surrogates, private ones, separators. Not those that this Python's Unicode does not
# have yet: a newer Python prints them, and the judge must write the same documents on both.
_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs")


class Option(NamedTuple):
    """One line of a menu: the name of the option, and notes shown beside it."""

    name: str
    note: str = ""
    warning: str = ""


def significant(value: float) -> str:
    """Three significant digits, four for whole numbers up to 9999; an exponent below 10^-4 and from 10^15 on."""
    return f"{value:.{decimals(value)}f}" if value == 0 or 1e-4 <= abs(value) < 1e15 else f"{value:.3g}"


def decimals(value: float) -> int:
    """Number of decimals for three significant digits, at most 6."""
    if value == 0 or not math.isfinite(value):
        return 0
    return min(6, max(0, 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))))


def display_width(text: str) -> int:
    """Columns that `text` takes on a terminal: wide East Asian characters take two, combining marks none."""
    if text.isascii():
        return len(text)

    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def clean(text: str, *, keep: str = "") -> str:
    """Untrusted `text` with characters escaped that could move the cursor, reorder text or forge lines.

    White space becomes spaces; control, format and bidirectional characters become escapes (\\x1b, \\u202e).
    Characters in `keep` are unchanged.
    """
    if (text.translate(dict.fromkeys(map(ord, keep))) if keep else text).isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep
        else " "
        if character.isspace()
        else character.encode("unicode_escape").decode()
        for character in text
    )


def clean_values(value: Any) -> Any:
    """A parsed JSON value with all strings and keys cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): clean_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_values(item) for item in value]
    return value


def disarm_commands(text: str) -> str:
    """`text` with workflow commands of GitHub's runner escaped.

    The runner executes lines that begin with "::" after any white space, and "##[" anywhere (actions/runner,
    ActionCommand.cs).
    """
    return _WORKFLOW_COMMAND.sub(r"\1\\\2", text) if "::" in text or "##[" in text else text


def one_line(text: str, limit: int = 200) -> str:
    """Untrusted text as one printable line of at most `limit` characters."""
    if not text.isprintable():
        text = "".join(" " if unicodedata.category(char) in _UNSEEN else char for char in text)
    return " ".join(text.split())[:limit]


def shorten(value: object, limit: int = 60) -> str:
    """At most `limit` characters of the text; an ellipsis marks the cut."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten_line(value: object, limit: int = 300) -> str:
    """Like `shorten`, with white space collapsed."""
    return shorten(" ".join(str(value).split()), limit)


def without_colors(text: str) -> str:
    """A line that a program wrote for a terminal, without the escape sequences for colors and the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def list_some(words: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """The first `most` words, and how many more there are: "a, b, c, d and 3 more"."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return separator.join(words[:most]) + more


def cut(text: str, width: int) -> str:
    """`text` in at most `width` terminal columns; an ellipsis marks the cut."""
    if display_width(text) <= width:
        return text
    while text and display_width(text) > width - 1:
        text = text[:-1]
    return text + "…"


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; at least one."""
    if display_width(text) <= width:
        return [text]

    return [cut(piece, width) for piece in textwrap.wrap(text, width)] or [""]


def fold(line: str, width: int) -> str:
    """A line of prose, or a command to paste, as lines of at most `width` columns that end between words.

    The lines of a command are joined by backslashes, as a shell reads them; words in quotes stay together.
    """
    if display_width(line) <= width:
        return line
    is_command = _COMMAND.match(line) is not None
    begin = re.match(r"\s*(\| )?", line)
    indent = begin[0] if begin is not None and begin[1] else (begin[0] if begin is not None else "") + "  "
    lines, current = [], ""
    for word in _WORDS.findall(line) if is_command else re.findall(r"\s*\S+", line):
        end = " \\" if is_command else ""
        if current and display_width(current + word + end) > width:
            lines.append(current + end)
            current = indent + word.strip()
        else:
            current += word
    return "\n".join([*lines, current])


def fit_parts(parts: Sequence[tuple[str, int]], width: int | None) -> str:
    """Join (text, rank) parts of a line; drops those with the highest ranks until they fit into `width`."""
    kept = [(text, rank) for text, rank in parts if text]
    while width is not None and len(kept) > 1 and display_width(", ".join(text for text, _ in kept)) > width:
        worst = max(rank for _, rank in kept)
        last = max(index for index, (_, rank) in enumerate(kept) if rank == worst)
        kept.pop(last)
    line = ", ".join(text for text, _ in kept)
    return line if width is None else cut(line, width)


def counted(count: float, noun: str, plural: str = "") -> str:
    """ "1 run", "2 runs": a number and its noun, whose plural ends with "s" unless it is given."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds for people: "850 ms", "12.3 s", "4 min 5 s", "24 h", "3 d 4 h"."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:  # 999 ms at most: 1000 ms are 1.0 s
        return f"{seconds * 1000:.0f} ms"
    if seconds >= 59.95:
        seconds = round(seconds)
    for large, name, small, unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= (2 * large if name == "d" else large):
            count, rest = divmod(round(seconds / small), large // small)
            return f"{count} {name}" + (f" {rest} {unit}" if rest else "")
    return f"{seconds:.1f} s"


def rough_duration(seconds: float) -> str:
    """Whole seconds, for running clocks: "0 s", "26 s", "1 min 5 s"."""
    seconds = round(seconds)
    return f"{seconds} s" if seconds < 60 else duration(seconds)


def ago(moment: str) -> str:
    """Time since an RFC 3339 time: "just now", "4 min ago"."""
    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def size(count: float) -> str:
    """Bytes for people: "980 B", "1.4 GiB"."""
    for unit, shown in (("B", ".0f"), ("KiB", ".1f"), ("MiB", ".1f"), ("GiB", ".1f")):
        if float(f"{count:{shown}}") < 1024:
            return f"{count:{shown}} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def brief(value: Any) -> str:
    """The value's repr, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
