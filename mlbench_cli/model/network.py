"""A network as rate per rank and direction plus one-way delay: parsing, checking and formatting.

"1gbit,5ms" is 10^9 bits per second for each rank in each direction, and 5 ms from any rank to any other on top of the
machine's own latency. "model:1gbit,5ms" is computed by a formula instead of being emulated. Units are decimal: kbit
mbit gbit tbit, us ms s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlbench_cli.errors import UsageError

MODEL = "model:"
MODELED, NOT_SHAPED = "model", "none"  # methods in network.json, besides those of the engine
NOT_AS_ASKED = "network_not_as_asked"  # finding code on every engine for a network that could not be provided
NOT_AS_ASKED_HINT = "Use another network or fewer workers, or wait until the machine is idle."
MIN_RATE = 1e5  # bits per second
MAX_RATE = 1e14
MAX_DELAY = 10.0  # seconds
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-z]+)(?:/s)?")
_DELAY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-zµ]+)")
_HINT = "For example 1gbit,5ms: rate per rank and direction, and one-way delay."
_NOT_OFFERED = ("loss", "jitter", "reorder", "duplicate", "corrupt", "burst")


SUBNET = "10.77.0"  # of the workers of a local run with an emulated network


def worker_address(worker: int) -> str:
    """The address of a worker in the network that the local engine creates."""
    return f"{SUBNET}.{worker + 1}"


def is_modeled(text: str) -> bool:
    """Whether the text of a network (see NetworkShape) is a model instead of an emulated network."""
    return text.startswith(MODEL)


class NetworkShape(NamedTuple):
    """`rate` in bits per second, one-way `delay` in seconds; `is_modeled`: computed by a formula, not emulated."""

    rate: float
    delay: float = 0.0
    is_modeled: bool = False

    def __str__(self) -> str:
        """The canonical text: "1gbit,5ms", "100mbit", "model:10gbit,50us"."""
        delay = f",{_with_unit(self.delay, _DELAYS)}" if self.delay else ""
        return f"{MODEL if self.is_modeled else ''}{_with_unit(self.rate, _RATES)}{delay}"

    @property
    def message_delay(self) -> str:
        """The equivalent value of a method's option `delay`: seconds per message and per byte."""
        return f"{self.delay:.9g},{self.seconds_per_byte:.9g}"

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte at this rate."""
        return 8 / self.rate


def parse_network(text: str, what: str = "--network") -> NetworkShape:
    """Parse a network. Raises UsageError with the reason."""
    plain = text.strip().lower()
    rate, *others = (part.strip() for part in plain.removeprefix(MODEL).split(","))
    for part in others:
        name = part.partition("=")[0]
        if name in _NOT_OFFERED:
            raise UsageError(
                f"{what} {text[:60]}: {name} is not supported.",
                hint="Its effect would depend on the size of packets, which differs from that of a real network here.",
            )
    if len(others) > 1:
        raise UsageError(f'{what} "{text[:60]}" has more than a rate and a delay.', hint=_HINT)
    shape = NetworkShape(
        _parse_part(rate, _RATE, _RATES, "rate", text, what),
        _parse_part(others[0], _DELAY, _DELAYS, "delay", text, what) if others else 0.0,
        is_modeled(plain),
    )
    if not MIN_RATE <= shape.rate <= MAX_RATE:
        raise UsageError(f"{what} {text[:60]}: the rate must be from 100kbit to 100tbit.")
    if shape.delay > MAX_DELAY:
        raise UsageError(f"{what} {text[:60]}: the delay must be at most 10s.")
    return shape


def _parse_part(part: str, pattern: re.Pattern[str], units: dict[str, float], name: str, text: str, what: str) -> float:
    found = pattern.fullmatch(part)
    unit = "us" if found and found[2] == "µs" else found[2] if found else ""
    if found is None or unit not in units:
        raise UsageError(
            f'{what} "{text[:60]}": the {name} "{part[:40]}" is not a number with a unit of {", ".join(units)}.',
            hint=_HINT,
        )
    return float(f"{float(found[1]) * units[unit]:.12g}")


def _with_unit(value: float, units: dict[str, float]) -> str:
    """The value in the largest unit in which it is at least 1."""
    unit = next((unit for unit in reversed(units) if value >= units[unit] * (1 - 1e-12)), next(iter(units)))
    return f"{value / units[unit]:.9g}{unit}"


# --- what a probe must find on a shaped network -----------------------------------------------------------------------

MIN_GOODPUT = 0.95  # of the requested rate, which counts payload
MAX_GOODPUT = 1.02
RTT_SHARE = 0.10  # of the requested round trip, or
RTT_SECONDS = 4e-4  # this many seconds, whichever is more
PING_BYTES = 53  # of a probe's small packets: one byte and its headers, 4 ms at 100 kbit/s
MAX_BURST = 1.10  # rate of the first MiB after a pause relative to the steady rate; a burst is a multiple of it


def find_deviations(shape: NetworkShape, report: Mapping[str, Any]) -> list[str]:
    """Sentences about how a probe's report deviates from the requested network; empty if it matches.

    `report` is what agent/network/probe.py measures: `links` with seconds and bits per second.
    """
    if report.get("error") or not report.get("links"):
        return [f"it could not be measured: {report.get('error') or 'no links'}"]
    links = report["links"]
    found = []
    for name, key in (("alone", "alone_bits_per_second"), ("with all ranks sending", "together_bits_per_second")):
        rates = sorted(float(link[key]) for link in links if link.get(key) is not None)
        if rates and not MIN_GOODPUT * shape.rate <= rates[len(rates) // 2] <= MAX_GOODPUT * shape.rate:
            found.append(f"it carries {format_rate(rates[len(rates) // 2])} {name}")
    trips = sorted(float(link["rtt_p50_seconds"]) for link in links if link.get("rtt_p50_seconds") is not None)
    if trips:
        trip, asked = trips[len(trips) // 2], 2 * shape.delay
        sending = 2 * PING_BYTES * shape.seconds_per_byte
        if abs(trip - sending - asked) > max(RTT_SHARE * asked, RTT_SECONDS):
            found.append(f"its round trip is {format_seconds(trip)} instead of {format_seconds(asked)}")
    for link in links:
        first = link.get("first_bits_per_second")
        if first is not None and float(first) > MAX_BURST * shape.rate:
            found.append(f"it lets the first MiB after a pause through at {format_rate(float(first))}")
    return found


def network_phrase(summary: Mapping[str, Any]) -> str:
    """ "emulated 1gbit,5ms (got 970 Mbit/s, RTT 10.4 ms)"; empty without a network."""
    asked, trip = summary["asked"], summary["rtt_seconds"]
    rate = summary["together_bits_per_second"] or summary["alone_bits_per_second"]
    figures = [] if rate is None else [format_rate(rate)]
    figures += [] if trip is None else [f"RTT {format_seconds(trip)}"]
    if asked is None:
        return ", ".join(figures) if summary["networks"] != 1 else ""
    if summary["method"] == MODELED:
        return f"modeled {asked.removeprefix(MODEL)}, computed by a formula and not measured"
    got = f"got {', '.join(figures)}" if figures else "not measured"
    text = f"emulated {asked} ({got})"
    return text if summary["held"] else f"{text}, which did not hold: {'; '.join(summary['problems'])}"


_ROUNDED = 0.9995  # of a unit: from here on three digits round to 1 of it; the unit below would give 1e+03


def format_rate(bits_per_second: float) -> str:
    """ "940 Mbit/s"."""
    unit = next((unit for unit in ("tbit", "gbit", "mbit") if bits_per_second >= _ROUNDED * _RATES[unit]), "kbit")
    return f"{bits_per_second / _RATES[unit]:.3g} {unit.capitalize()}/s"


def format_seconds(seconds: float) -> str:
    """ "10.4 ms"."""
    unit = next((unit for unit in ("s", "ms") if seconds >= _ROUNDED * _DELAYS[unit]), "us")
    return f"{seconds / _DELAYS[unit]:.3g} {unit}"
