"""Collectives that other programs have measured: nccl-tests (text and JSON) and OSU micro-benchmarks, as curves.

Formats were read in nccl-tests 2.19.6 and in logs of OSU 5 to 7.5. Times there are microseconds; a GB of nccl-tests is
10^9 bytes, a MB of OSU 10^6. The environment that nccl-tests' JSON holds is never kept: it may hold secrets.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.analysis.collectives import FACTS, Curve

MAX_BYTES = 64 << 20
_TYPES = {
    "float": "fp32",
    "half": "fp16",
    "bfloat16": "bf16",
    "double": "fp64",
    "int32": "int32",
    "int": "int32",
    "MPI_FLOAT": "fp32",
    "MPI_INT": "int32",
    "MPI_DOUBLE": "fp64",
    "MPI_CHAR": "bytes",
}
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
    "gather": "gather",
    "scatter": "scatter",
    "latency": "send_recv",
    "bandwidth": "send_recv",
    "bibandwidth": "send_recv",
}
# Values as nccl-tests prints them; JSON has no such numbers.
_NOT_JSON = re.compile(r"(?<=[:\s,\[])(-?)(inf|nan)(?=\s*[,}\]])")
_ROW = re.compile(r"\s*\d+(\s+\S+)+\s*")
_OSU_TITLE = re.compile(r"#\s*OSU MPI\S*\s+(?P<name>.+?)\s+Test\s+v(?P<version>[\w.]+)")
_Point = tuple[int, float, float]


@dataclass
class _Found:
    """What has been read of one file. Points by (collective, data type, place); no collective: the file's."""

    program: str
    collective: str = ""
    ranks: int = 0
    device: str = "gpu"
    points: dict[tuple[str, str, str], list[_Point]] = field(default_factory=dict)

    def add(self, kind: str, place: str, size: int, time: float, bandwidth: float, own: str = "") -> None:
        """Keep a point; what has no time, or one that is no number, is left out."""
        if size > 0 and 0 < time < math.inf:
            known = bandwidth if 0 <= bandwidth < math.inf else 0.0
            key = own, _TYPES.get(kind, kind or "bytes"), place
            self.points.setdefault(key, []).append((size, time, known))


def read_foreign_curves(path: Path) -> list[Curve]:
    """The curves in a file of nccl-tests or OSU. Raises NotFoundError, or UsageError for a file without any."""
    text = _read(path)
    start = text.lstrip()[:1]
    found = _read_json(text, path) if start == "{" else _read_text(text)
    if found is None or not found.points:
        raise UsageError(
            f"{path} has no rows of nccl-tests (text or -J JSON) or of an OSU benchmark.",
            hint="all_reduce_perf … > FILE, or osu_allreduce … > FILE",
        )
    name = found.collective or _name_collective(path.stem) or "collective"
    ranks = f"{found.ranks} ranks" if found.ranks else "unknown ranks"
    facts = {**dict.fromkeys(FACTS, ""), "backend": found.program, "ranks": ranks, "device": found.device}
    facts["cluster"] = path.name[:60]
    machine, run = f"{found.program}, {path.name[:60]}", path.stem[:60]
    return [
        Curve(run, own or name, kind, place, tuple(sorted(points)), None, facts, machine)
        for (own, kind, place), points in found.points.items()
    ]


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB.", hint="Name a file of nccl-tests or OSU.")
        return path.read_text("utf-8", "replace")
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {path}.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None


# --- nccl-tests -----------------------------------------------------------------------------------------------------


def _read_json(text: str, path: Path) -> _Found | None:
    """Version 3 of nccl-tests' JSON; numbers may be bare "inf", flags are texts."""
    words = {"inf": "Infinity", "nan": "NaN"}
    try:
        document = json.loads(_NOT_JSON.sub(lambda match: match[1] + words[match[2]], text))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not complete JSON: {error}.", hint="nccl-tests leaves an incomplete file if it crashes."
        ) from None
    rows = document.get("results")
    if not isinstance(rows, list):
        return None
    found = _Found("nccl-tests")
    config, arguments = document.get("config"), document.get("args")
    devices = config.get("devices") if isinstance(config, Mapping) else None
    found.ranks = len(devices) if isinstance(devices, list) else 0
    if isinstance(arguments, list) and arguments:
        found.collective = _name_collective(str(arguments[0]))
    for row in rows:
        if isinstance(row, Mapping):
            size, kind = _number(row.get("size")), str(row.get("type") or "")
            own = _name_collective(str(row.get("experiment_name") or ""))
            for place in ("out_of_place", "in_place"):
                side = row.get(place)
                if isinstance(side, Mapping):
                    time = _number(side.get("time") if "time" in side else side.get("cpu_time"))
                    found.add(kind, place, int(size) if size < math.inf else 0, time, _number(side.get("bus_bw")), own)
    return found


def _read_text(text: str) -> _Found | None:
    lines = text.splitlines()
    title = next((match for line in lines if (match := _OSU_TITLE.search(line))), None)
    if title is not None:
        return _read_osu(lines, title)
    version = next((match[1] for line in lines if (match := re.search(r"nccl-tests version (\S+)", line))), "")
    found = _Found(f"nccl-tests {version}".strip())
    found.collective = next((name for line in lines if line.startswith("#") and (name := _name_program(line))), "")
    found.ranks = sum(1 for line in lines if re.match(r"#\s+Rank\s+\d+\s", line))
    for line in lines:
        if _ROW.fullmatch(line):
            _take_text_row(found, line)
    return found


def _take_text_row(found: _Found, line: str) -> None:
    """size count type redop root, then time algbw busbw #wrong for each place; out of place may be blank.

    With minima and maxima a side has four numbers more between busbw and #wrong; a timestamp may follow.
    """
    words = line.split()
    if len(words) < 9 or not re.fullmatch(r"[a-z]\w*", words[2]):
        return
    sides = words[5:]
    width = {8: 4, 10: 4, 16: 8, 18: 8}.get(len(sides))
    if width is not None:
        places = [("out_of_place", sides[:width]), ("in_place", sides[width : 2 * width])]
    elif len(sides) in (4, 6, 8):
        places = [("in_place", sides[:4])]
    else:
        return
    for place, side in places:
        found.add(words[2], place, int(words[0]), _number(side[0]), _number(side[2]))


# --- OSU ------------------------------------------------------------------------------------------------------------


def _read_osu(lines: Sequence[str], title: "re.Match[str]") -> _Found:
    found = _Found(f"OSU {title['version']}", _name_collective(title["name"].split()[0]) or "send_recv", device="cpu")
    kind = next((match[1] for line in lines if (match := re.match(r"#\s*Datatype:\s*(\w+)", line))), "")
    is_rate = "Bandwidth" in title["name"]
    for size, value in _osu_rows(lines):
        if is_rate:  # MB/s
            found.add(kind, "out_of_place", size, size / value if value > 0 else 0.0, value / 1e3)
        else:
            found.add(kind, "out_of_place", size, value, 0.0)
    return found


def _osu_rows(lines: Sequence[str]) -> Iterator[tuple[int, float]]:
    """(bytes, value); noise of MPI and of job managers may stand between rows."""
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0].isascii() and words[0].isdecimal() and len(words[0]) < 16:
            value = _number(words[1])
            if value == value:
                yield int(words[0]), value


# --- words ----------------------------------------------------------------------------------------------------------


def _name_program(line: str) -> str:
    match = re.search(r"(\w+)_perf\b", line) or re.search(r"Collective test starting: (\w+)", line)
    return _name_collective(match[1]) if match else ""


def _name_collective(text: str) -> str:
    """Our name of a collective in a program's or file's name; empty if there is none."""
    plain = re.sub(r"[^a-z]", "", Path(text).name.lower().removesuffix("_perf"))
    return next((_NAMES[word] for word in sorted(_NAMES, key=len, reverse=True) if word in plain), "")


def _number(value: object) -> float:
    """A number as nccl-tests prints it: "1.4e+03", "N/A" or a value; not a number for anything else."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
