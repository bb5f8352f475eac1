"""The lines of text files that people made anywhere."""

from collections.abc import Iterator
from pathlib import Path

from task_images.contract import EnvironmentUnfitError

MARK = "\ufeff"  # of the byte order, which Windows' editors write first


def decode_line(raw: bytes, number: int, name: str, hint: str) -> str:
    """A line of UTF-8 without its end and, if it is the first, without a byte order mark. Raises EnvironmentUnfitError
    that names the line and the byte."""
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EnvironmentUnfitError(
            f"line {number} of {name} is not UTF-8: {error.reason} at byte {error.start}", hint
        ) from None
    return (line.removeprefix(MARK) if number == 1 else line).removesuffix("\n").removesuffix("\r")


def read_lines(path: Path, hint: str) -> Iterator[str]:
    """The lines of a text file, as `decode_line`. Raises EnvironmentUnfitError also if the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                yield decode_line(raw, number, str(path), hint)
    except OSError as error:
        raise EnvironmentUnfitError(f"{path} cannot be read: {error.strerror}", hint) from None
