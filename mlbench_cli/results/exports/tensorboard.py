"""TensorBoard event files, written without TensorBoard: one folder per rank of each run.

A record is its length (64 bit), the masked CRC-32C of these 8 bytes, the data, and the masked CRC-32C of the data. The
data are an Event of tensorflow/core/util/event.proto. TensorBoard's writer would include host name, process and
current time; here the same run gives the same bytes. Values are stored as 32-bit floats.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports.facts import RunFacts, count_steps, list_values

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_MAX_FLOAT = 3.4028234663852886e38
_DT_STRING = 7


def _make_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (_POLYNOMIAL if number & 1 else 0)
        table.append(number)
    return tuple(table)


_TABLE = _make_table()


class EventFile:
    """One event file, flushed by `flush` and `close`."""

    def __init__(self, path: Path, created: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by close
        self._write(_field(1, created) + _field(3, b"brain.Event:2"))

    def add_scalar(self, tag: str, value: float, step: int, time: float) -> None:
        number = max(-_MAX_FLOAT, min(_MAX_FLOAT, value)) if math.isfinite(value) else value
        scalar = _field(1, tag.encode()) + b"\x15" + struct.pack("<f", number)
        self._write(_field(1, time) + _field(2, step) + _field(5, _field(1, scalar)))

    def add_text(self, tag: str, text: str, time: float) -> None:
        """A Markdown text, for the tab of texts."""
        tensor = _field(1, _DT_STRING) + _field(2, _field(2, _field(1, 1))) + _field(8, text.encode())
        metadata = _field(1, _field(1, b"text"))
        value = _field(1, tag.encode()) + _field(8, tensor) + _field(9, metadata)
        self._write(_field(1, time) + _field(5, _field(1, value)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))


class TensorBoardSink:
    """FOLDER/RUN/rank-N/: metrics by name, and resource usage under "machine/"."""

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self._folder = folder / facts.name
        self._facts = facts
        self._files: dict[int, EventFile] = {}
        self._counts: dict[tuple[str, int], int] = {}
        rows = "".join(f"| {name} | {value} |\n" for name, value in facts.config.items())
        self._file(0).add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}", facts.created)

    def add(self, points: Sequence[MetricPoint], samples: Sequence[ResourceSample] = ()) -> None:
        for point in points:
            self._file(point.rank).add_scalar(point.name, point.value, count_steps(point, self._counts), point.time)
        for sample in samples:
            step = max(0, round(sample.time - self._facts.created))
            for name, value in list_values(sample):
                self._file(sample.rank).add_scalar(name, value, step, sample.time)
        for file in self._files.values():
            file.flush()

    def close(self, summary: Mapping[str, float], outcome: str | None) -> None:
        for name, value in summary.items():
            self._file(0).add_scalar(f"result/{name}", value, 0, self._facts.created)
        for file in self._files.values():
            file.close()

    def _file(self, rank: int) -> EventFile:
        if rank not in self._files:
            created = self._facts.created
            name = f"events.out.tfevents.{int(created):010d}.mlbench"
            self._files[rank] = EventFile(self._folder / f"rank-{rank}" / name, created)
        return self._files[rank]


# --- the wire format ------------------------------------------------------------------------------------------------


def _field(number: int, value: float | int | bytes) -> bytes:
    """A field of a protocol buffer: a double, an integer, or length-delimited bytes."""
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C: rotated right by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    masked = (crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8 & 0xFFFFFFFF
    return struct.pack("<I", masked)
