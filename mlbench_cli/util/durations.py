"""Parse durations as people write them: "90s", "15m", "2h", "1h30m", or a plain number of seconds."""

import re
import time
from datetime import datetime

from mlbench_cli.errors import UsageError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")


def parse_duration(text: str, what: str = "--timeout") -> float:
    """Seconds in "90s", "15m", "2h", "1h30m" or "90". Raises UsageError that names `what`."""
    text = text.strip()
    if text.isdecimal() and text.isascii():
        return float(text)
    if not text.isascii() or not _DURATION.fullmatch(text):
        shown = text if len(text) <= 60 else text[:59] + "…"
        raise UsageError(f'{what} "{shown}" is not a duration.', hint="Write 90s, 15m, 2h or 1h30m.")
    return sum(float(part[:-1]) * _UNITS[part[-1]] for part in re.findall(r"[\d.]+[smhd]", text))


def parse_since(text: str, what: str = "--since") -> float:
    """Seconds since 1970 for a duration before now or an RFC 3339 time; without a time zone, the local one."""
    if "-" not in text[:5]:
        return time.time() - parse_duration(text, what)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f'{what} "{text[:60]}" is neither a duration nor a time.', hint="Write 10m, 2h or 2026-01-31T10:00:00Z."
        ) from None
