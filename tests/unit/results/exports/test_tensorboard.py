"""TensorBoard's event files, decoded here by the published formats.

Records: tensorflow/core/lib/io/record_writer.h. CRC-32C: RFC 3720, appendix B.4. Wire format:
https://protobuf.dev/programming-guides/encoding. Fields: event.proto, summary.proto, tensor.proto of TensorFlow.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlbench_cli.results.analysis.tables import MetricPoint, ResourceSample
from mlbench_cli.results.exports import tensorboard
from mlbench_cli.results.exports.facts import RunFacts
from mlbench_cli.results.exports.tensorboard import EventFile, TensorBoardSink

CREATED = 1_760_000_000.75
FILE = "events.out.tfevents.1760000000.mlbench"


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, with the polynomial 0x1EDC6F41 in reflected order."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    """TensorFlow's mask: ((crc >> 15) | (crc << 17)) + 0xa282ead8 in 32 bits."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def read_records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (mask(crc32c(data[:8])),)
        record = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (mask(crc32c(record)),)
        yield record
        data = data[16 + length :]


def read_varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for index, byte in enumerate(data):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, data[index + 1 :]
    raise AssertionError("a varint without its last byte")


def read_message(data: bytes) -> dict[int, Any]:
    """Field number -> value of a message without repeated fields."""
    found: dict[int, Any] = {}
    while data:
        key, data = read_varint(data)
        number, kind = key >> 3, key & 7
        assert number not in found
        if kind == 0:
            found[number], data = read_varint(data)
        elif kind == 1:
            found[number], data = struct.unpack("<d", data[:8])[0], data[8:]
        elif kind == 2:
            length, data = read_varint(data)
            found[number], data = data[:length], data[length:]
        else:
            assert kind == 5
            found[number], data = struct.unpack("<f", data[:4])[0], data[4:]
    return found


class Scalar(NamedTuple):
    tag: str
    value: float
    step: int
    time: float


def read_events(path: Path) -> list[dict[int, Any]]:
    return [read_message(record) for record in read_records(path.read_bytes())]


def read_scalars(path: Path) -> list[Scalar]:
    """The scalars of an event file: Event has wall_time 1, step 2, summary 5; Summary.Value tag 1, simple_value 2."""
    found = []
    for event in read_events(path)[1:]:
        value = read_message(read_message(event[5])[1])
        if 2 in value:
            found.append(Scalar(value[1].decode(), value[2], event.get(2, 0), event[1]))
    return found


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),  # the examples of RFC 3720
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_masked_crc_32cs(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    assert tensorboard._checksum(data) == struct.pack("<I", mask(crc))


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**14 - 1, 2**14, 2**31, 2**63 - 1])
def test_integers_have_seven_bits_per_byte(value: int) -> None:
    encoded = tensorboard._varint(value)
    assert read_varint(encoded) == (value, b"")
    assert len(encoded) == max(1, math.ceil(value.bit_length() / 7))


def test_the_example_of_the_wire_format() -> None:
    """Field 1 with the integer 150 is 08 96 01, field 2 with the text "testing" 12 07 and its letters."""
    assert tensorboard._field(1, 150) == b"\x08\x96\x01"
    assert tensorboard._field(2, b"testing") == b"\x12\x07testing"
    assert tensorboard._field(1, 0.5) == b"\x09" + struct.pack("<d", 0.5)
    assert tensorboard._field(16, b"") == b"\x82\x01\x00"


def test_a_file_begins_with_its_version_and_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / FILE
    EventFile(path, CREATED).close()
    assert read_events(path) == [{1: CREATED, 3: b"brain.Event:2"}]


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.5, 0.5),
        (0.1, struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        (1e300, 3.4028234663852886e38),  # the largest 32-bit float
        (-1e300, -3.4028234663852886e38),
        (3.4028234663852886e38, 3.4028234663852886e38),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (-0.25, -0.25),
    ],
)
def test_a_scalar_is_a_32_bit_float(tmp_path: Path, value: float, stored: float) -> None:
    file = EventFile(tmp_path / FILE, 1.0)
    file.add_scalar("val_Prec@1", value, 300, 2.5)
    file.close()
    assert read_scalars(tmp_path / FILE) == [Scalar("val_Prec@1", stored, 300, 2.5)]


def test_what_is_no_number_stays_so(tmp_path: Path) -> None:
    file = EventFile(tmp_path / FILE, 1.0)
    file.add_scalar("x", math.nan, 0, 1.0)
    file.close()
    assert math.isnan(read_scalars(tmp_path / FILE)[0].value)


def test_a_text_is_a_tensor_for_the_plugin_of_texts(tmp_path: Path) -> None:
    file = EventFile(tmp_path / FILE, 1.0)
    file.add_text("settings", "| größe |", 2.5)
    file.close()
    event = read_events(tmp_path / FILE)[1]
    assert (event[1], set(event)) == (2.5, {1, 5})
    value = read_message(read_message(event[5])[1])
    assert value[1] == b"settings"
    tensor = read_message(value[8])  # dtype 1 (DT_STRING is 7), tensor_shape 2, string_val 8
    assert (tensor[1], tensor[8].decode()) == (7, "| größe |")
    assert read_message(read_message(tensor[2])[2]) == {1: 1}  # one dimension of size 1
    assert read_message(read_message(value[9])[1]) == {1: b"text"}  # metadata: plugin_data: plugin_name


# --- runs -------------------------------------------------------------------------------------------------------------


def facts(**config: Any) -> RunFacts:
    return RunFacts("demo-2", "7f", "mnist", 2, CREATED, config, {}, None)


def point(name: str = "loss", value: float = 0.5, rank: int = 0, **more: Any) -> MetricPoint:
    return MetricPoint("demo-2", 2, rank, **{"time": CREATED + 1, "name": name, "value": value, **more})


def test_every_rank_has_a_folder_with_its_values(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, facts(backend="gloo"))
    sink.add([point(step=10), point(value=0.25, step=20), point(rank=1), point(rank=1), point("acc", 80.5)])
    sink.close({}, "completed")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*mlbench")) == [
        f"demo-2/rank-0/{FILE}",
        f"demo-2/rank-1/{FILE}",
    ]
    at = CREATED + 1
    assert read_scalars(tmp_path / "demo-2" / "rank-0" / FILE) == [
        Scalar("loss", 0.5, 10, at),
        Scalar("loss", 0.25, 20, at),
        Scalar("acc", 80.5, 0, at),
    ]
    assert read_scalars(tmp_path / "demo-2" / "rank-1" / FILE) == [
        Scalar("loss", 0.5, 0, at),
        Scalar("loss", 0.5, 1, at),
    ]
    assert all(read_events(path)[0][1] == CREATED for path in tmp_path.rglob("*mlbench"))


def test_the_settings_are_a_table_of_rank_0(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path, facts(backend="gloo", workers=2)).close({}, None)
    (event,) = read_events(tmp_path / "demo-2" / "rank-0" / FILE)[1:]
    value = read_message(read_message(event[5])[1])
    assert (value[1], event[1]) == (b"settings", CREATED)
    assert read_message(value[8])[8] == b"| setting | value |\n| --- | --- |\n| backend | gloo |\n| workers | 2 |\n"


@pytest.mark.parametrize(("after", "step"), [(0.0, 0), (0.4, 0), (0.6, 1), (59.6, 60), (-5.0, 0)])
def test_samples_of_the_machine_are_at_their_second(tmp_path: Path, after: float, step: int) -> None:
    """A clock that was set back gives no negative step."""
    sink = TensorBoardSink(tmp_path, facts())
    sample = ResourceSample("demo-2", 1, CREATED + after, cpu_seconds=1.5, rss_bytes=4096.0)
    sink.add([], [sample])
    sink.close({}, None)
    assert read_scalars(tmp_path / "demo-2" / "rank-1" / FILE) == [
        Scalar("machine/cpu_seconds", 1.5, step, CREATED + after),
        Scalar("machine/rss_bytes", 4096.0, step, CREATED + after),
    ]


def test_results_are_values_of_rank_0_at_the_time_of_the_run(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, facts())
    sink.close({"task_seconds": 60.0, "goal_value": 80.5}, "goal_reached")
    assert read_scalars(tmp_path / "demo-2" / "rank-0" / FILE) == [
        Scalar("result/task_seconds", 60.0, 0, CREATED),
        Scalar("result/goal_value", 80.5, 0, CREATED),
    ]


def test_a_run_that_is_followed_can_be_read_meanwhile(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, facts())
    sink.add([point(), point(rank=1)])
    for rank in (0, 1):
        assert len(read_scalars(tmp_path / "demo-2" / f"rank-{rank}" / FILE)) == 1
    sink.close({}, None)
    assert all(file._file.closed for file in sink._files.values())


def test_the_name_of_a_file_sorts_by_time(tmp_path: Path) -> None:
    """TensorBoard reads the files of a folder in the order of their names."""
    sink = TensorBoardSink(tmp_path, RunFacts("a", "7f", "t", 1, 5.0, {}, {}, None))
    sink.close({}, None)
    (path,) = tmp_path.rglob("*mlbench")
    assert path.name == "events.out.tfevents.0000000005.mlbench"
