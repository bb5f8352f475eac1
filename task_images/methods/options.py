"""Options of methods, as users give them: --set comm.NAME=VALUE."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}


class MethodError(ValueError):
    """An invalid method. `reason` is a sentence; `instead` is the nearest valid choice as command-line options."""

    def __init__(self, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.instead = instead


@dataclass(frozen=True)
class Option:
    """An option of a method: a number from `low` to `high`, whole if its default is; or text, read by `parse`.

    form    what to write, for the help; empty: a number
    """

    default: Any
    low: float = -math.inf
    high: float = math.inf
    help: str = ""
    parse: Callable[[str], Any] | None = None
    form: str = ""

    def read(self, name: str, text: str) -> Any:
        """The value of `text`. Raises MethodError."""
        try:
            if self.parse is not None:
                return self.parse(text)
            value = type(self.default)(text)
            if not self.low <= value <= self.high:
                raise ValueError
        except (ValueError, OverflowError):
            allowed = self.form or f"a {'whole ' * isinstance(self.default, int)}number {self.range}"
            raise MethodError(f"comm.{name} is {text!r}, not {allowed}", f"--set comm.{name}={self.default}") from None
        return value

    @property
    def range(self) -> str:
        """The range of its numbers, or the form of its text."""
        return self.form or f"from {self.low:g} to {self.high:g}"


class Delay(NamedTuple):
    """Seconds added to each message, and to each of its bytes."""

    alpha: float
    beta: float


def parse_size(text: str) -> int:
    """Bytes of a size such as 25MiB or 4096000. Raises ValueError."""
    digits = text.rstrip("BKMGik")
    unit = text[len(digits) :]
    value = float(digits)
    if unit not in UNITS or not 0 < value * UNITS[unit] < 2**50:
        raise ValueError(f"{text} is not a size")
    return int(value * UNITS[unit])


def parse_delay(text: str) -> Delay | None:
    """The delay of ALPHA,BETA. Raises ValueError."""
    if text == "none":
        return None
    alpha, _, beta = text.partition(",")
    delay = Delay(float(alpha), float(beta))
    if not all(0 <= part < 60 for part in delay):
        raise ValueError(f"{text} is no delay")
    return delay


DELAY = Option(
    "none", help="delay added to each message: seconds, and seconds per byte", parse=parse_delay, form="ALPHA,BETA"
)


def size_option(default: str, help: str) -> Option:
    """An option whose value is a size in bytes."""
    return Option(default, help=help, parse=parse_size, form="a size such as 25MiB")
