"""Times as RFC 3339 strings in UTC, to the millisecond."""

from datetime import UTC, datetime

MAX_SECONDS = 253402300799  # the last second of the year 9999


def now() -> str:
    """The current time as RFC 3339 in UTC, to the millisecond."""
    return timestamp(datetime.now(UTC).timestamp())


def timestamp(seconds: float) -> str:
    """Seconds since 1970 as RFC 3339 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_timestamp(text: str) -> float:
    """Seconds since 1970 of an RFC 3339 time with a time zone. Raises ValueError for anything else."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment.timestamp()


def read_moment(value: object) -> float | None:
    """A row's time in seconds since 1970: RFC 3339 in an archive, a number while the run is running."""
    if isinstance(value, str):
        try:
            return parse_timestamp(value)
        except (ValueError, OverflowError):
            return None
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS
    return float(value) if known and isinstance(value, int | float) else None
