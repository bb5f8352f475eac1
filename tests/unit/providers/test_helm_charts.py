"""Custom values, names of charts, and archives: what needs neither a cluster nor a network."""

import contextlib
import gzip
import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st

from mlbench_cli.errors import NotFoundError, UsageError
from providers.helm.archive import MAX_FILES, MAX_UNPACKED, unpack
from providers.helm.source import ChartReference, fetch_chart, parse_chart_reference
from providers.helm.values import merge_values, parse_custom_values, resolve_overrides, warn_about
from tests.fakes.chart_repository import chart_files, pack_chart, write_chart

DEFAULTS: dict[str, Any] = {
    "replicas": 1,
    "image": {"repository": "web", "tag": "v1"},
    "ports": [{"name": "http", "port": 80}, {"name": "admin", "port": 81}],
    "annotations": {},
    "auth": None,
    "deep": {"er": {"still": {"x": 1, "y": 2}}},
}


def resolve_entries(*entries: str) -> dict[str, object]:
    return resolve_overrides(parse_custom_values(entries), DEFAULTS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-7", -7), ("0", 0), ("0.5", 0.5), ("-12.25", -12.25), ("true", True), ("false", False),
        ("null", None), ("", ""), ("text", "text"), ("007", "007"), ("1e5", "1e5"), ("True", "True"), ("yes", "yes"),
        ("1.2.3", "1.2.3"), ("a=b", "a=b"), ('"5"', "5"), ('"a\\n\\"b\\""', 'a\n"b"'), ('""', ""),
        ("1.10", "1.10"), ("1.0", 1.0), ("NaN", "NaN"),
        ('["a", 1, null]', ["a", 1, None]), ('{"b": {"c": 0.5}}', {"b": {"c": 0.5}}),
        ("é ☃", "é ☃"), ("12345678901234567890", 12345678901234567890),
    ],
)  # fmt: skip
def test_types(text: str, value: Any) -> None:
    found = resolve_entries(f"auth={text}")["auth"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("path", "steps"),
    [
        ("a", ("a",)),
        ("a.b.c.d.e", ("a", "b", "c", "d", "e")),
        ("a[0]", ("a", 0)),
        ("a[2][10].b", ("a", 2, 10, "b")),
        (r"a.prometheus\.io/scrape", ("a", "prometheus.io/scrape")),
        (r"a\[0\].b", ("a[0]", "b")),
        (r"a\=b", ("a=b",)),
        ("0.1", ("0", "1")),
    ],
)
def test_paths(path: str, steps: tuple[str | int, ...]) -> None:
    [custom] = parse_custom_values([f"{path}=x=y"])
    assert (custom.path, custom.value) == (steps, "x=y")


@pytest.mark.parametrize("entry", ["a", "=1", ".a=1", "a.=1", "a..b=1", "a[=1", "a[x]=1", "a[-1]=1", "[0]=1", "a[0]b=1",
                                   "a]=1", "a\\"])  # fmt: skip
def test_malformed_paths_are_refused(entry: str) -> None:
    with pytest.raises(UsageError, match="--custom-value"):
        parse_custom_values([entry])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('"open', "Unterminated"),
        ('"a\\x"', "Invalid"),
        ("[1, 2", "is JSON"),
        ("{{ .Values.x }}", "is JSON"),
        ("[NaN]", "NaN is not JSON"),
    ],
)
def test_malformed_json_is_refused(value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_custom_values([f"auth={value}"])
    assert "in quotes" in str(caught.value.hint)


def test_the_last_of_several_values_counts_as_in_helm() -> None:
    assert resolve_entries("a.b=1", "a.c=2", "a.b=3") == {"a": {"b": 3, "c": 2}}
    assert resolve_entries("a=1", "a.b=2", "x[0].y=1", "x[0]=z") == {"a": {"b": 2}, "x": ["z"]}
    assert resolve_entries() == {}


def test_depth() -> None:
    """The original took two levels only, and lost the first of three."""
    assert resolve_entries("deep.er.still.x=9") == {"deep": {"er": {"still": {"x": 9}}}}
    assert merge_values(DEFAULTS, resolve_entries("deep.er.still.x=9"))["deep"] == {"er": {"still": {"x": 9, "y": 2}}}


def test_lists_keep_the_charts_other_elements() -> None:
    found = resolve_entries("ports[1].port=8081", "ports[2].name=more", "ports[2].port=1")
    assert found["ports"] == [
        {"name": "http", "port": 80},
        {"name": "admin", "port": 8081},
        {"name": "more", "port": 1},
    ]
    assert DEFAULTS["ports"][1]["port"] == 81


def test_a_gap_in_a_list_is_named() -> None:
    with pytest.raises(UsageError, match=r"ports\[4\]=1: the list has 2 elements, so the next is \[2\]"):
        resolve_entries("ports[4]=1")
    with pytest.raises(UsageError, match=r"the list has 0 elements"):
        resolve_entries("new[1]=1")


def test_a_mapping_of_the_chart_is_not_replaced_by_a_value() -> None:
    with pytest.raises(UsageError, match="image=3: in the chart this is a mapping, of repository, tag") as caught:
        resolve_entries("image=3")
    assert "image.repository=" in (caught.value.hint or "")
    assert resolve_entries("image=null") == {"image": None}
    assert resolve_entries("annotations=none", 'image={"tag": "x"}')["image"] == {"tag": "x"}


def test_null_takes_away() -> None:
    assert merge_values(DEFAULTS, resolve_entries("image.tag=null", "replicas=null")) == {
        **{key: value for key, value in DEFAULTS.items() if key != "replicas"},
        "image": {"repository": "web"},
    }


def test_unknown_paths_and_long_numbers_are_warned_of() -> None:
    customs = parse_custom_values(
        ["imgae.tag=x", "image.tga=y", "annotations.any=1", "sub.x=1", "global.y=1", "replicas=2000000"]
    )
    printed = warn_about(customs, DEFAULTS, ["sub"])
    assert len(printed) == 3
    assert 'no "imgae"' in printed[0]
    assert 'Did you mean "image"' in printed[0]
    assert 'Did you mean "tag"' in printed[1]
    assert "2e+06" in printed[2]


@pytest.mark.parametrize(
    ("value", "warns"),
    [("999999", False), ("1000000", True), ("-1000000", True), ("-999999", False), ("true", False)],
)
def test_helm_prints_numbers_of_seven_digits_with_an_exponent(value: str, warns: bool) -> None:
    assert bool(warn_about(parse_custom_values([f"replicas={value}"]), DEFAULTS, [])) is warns


@given_by(st.text())
@settings(deadline=None)
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        [custom] = parse_custom_values([text])
        assert merge_values(DEFAULTS, resolve_overrides([custom], DEFAULTS)) is not None


@given_by(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=4))
@settings(deadline=None)
def test_any_text_can_be_given_at_any_path(value: str, keys: list[str]) -> None:
    path = ".".join(re.sub(r"([\\.\[\]=])", r"\\\1", key) for key in keys)
    [custom] = parse_custom_values([f"{path}={json.dumps(value)}"])
    assert (custom.path, custom.value) == (tuple(keys), value)


# --- where a chart is -----------------------------------------------------------------------------------------------


def test_a_repository_a_chart_and_a_version() -> None:
    assert parse_chart_reference("https://example.org/charts/web@1.2.3-rc.1+b") == ChartReference(
        "https://example.org/charts", "web", "1.2.3-rc.1+b"
    )
    assert parse_chart_reference("http://127.0.0.1:1/web@v1.2.3").version == "v1.2.3"


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("https://example.org/web", "has no version"),
        ("https://example.org/web@latest", "not an exact version"),
        ("https://example.org/web@^1.2", "not an exact version"),
        ("https://example.org/web@1.2", "not an exact version"),
        ("https://example.org/web@", "not an exact version"),
        ("https://example.org@1.2.3", "has no chart"),
        ("https://me:secret@example.org/web@1.2.3", "do not put passwords"),
        ("http://example.org/web@1.2.3", "not encrypted"),
        ("http://127.0.0.1.example.org/web@1.2.3", "not encrypted"),
        ("ftp://example.org/web@1.2.3", "neither https nor http"),
        ("file:///web@1.2.3", "neither https nor http"),
        ("https://example.org/web?x=1@1.2.3", "are not allowed here"),
        ("oci://example.org/web@1.2.3", "image registries"),
        ("https://[::1/web@1.2.3", "is not an address"),
    ],
)
def test_what_names_no_chart_is_refused_unasked(location: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_chart_reference(location)
    assert "secret" not in str(caught.value)


def test_a_folder_is_copied_and_has_a_digest(tmp_path: Path) -> None:
    source = write_chart(tmp_path / "web")
    with fetch_chart(str(source)) as chart:
        (source / "values.yaml").write_text("changed: 1")
        assert (chart.name, chart.version, chart.values["replicas"]) == ("web", "1.2.3", 1)
        assert (chart.folder / "values.yaml").read_text() == chart_files()["values.yaml"]
        kept, digest = chart.folder, chart.digest
    assert not kept.exists()
    with fetch_chart(str(source)) as chart:
        assert chart.digest != digest


def test_dates_are_texts(tmp_path: Path) -> None:
    write_chart(tmp_path / "web", **{"values.yaml": "days: [{since: 2026-01-02, x: 1}]"})
    with fetch_chart(str(tmp_path / "web")) as chart:
        found = resolve_overrides(parse_custom_values(["days[0].x=2"]), chart.values)
    assert found == {"days": [{"since": "2026-01-02", "x": 2}]}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no Chart.yaml"),
        ({"Chart.yaml": "name: web\nversion: 1.2.3"}, "no apiVersion"),
        ({"Chart.yaml": "apiVersion: v2\nname: web"}, "no version"),
        ({"Chart.yaml": "apiVersion: v2\nname: Web_1\nversion: 1.2.3"}, "cannot be the name of a release"),
        ({"Chart.yaml": "apiVersion: v2\nname: web\nversion: 1.2.3\ntype: library"}, "library"),
        ({"Chart.yaml": "a: [b"}, "not valid YAML"),
        ({"Chart.yaml": "- 1"}, "not a mapping"),
        ({**chart_files(), "values.yaml": "- 1"}, "values.yaml .* not a mapping"),
    ],
)
def test_a_folder_that_is_no_chart(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=says), fetch_chart(str(tmp_path)):
        pass


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"), fetch_chart(str(tmp_path / "nope")):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a folder"), fetch_chart(str(tmp_path / "file")):
        pass


# --- archives -------------------------------------------------------------------------------------------------------


def _member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


WHOLE = pack_chart(chart_files())
EVIL: dict[str, tuple[bytes, str]] = {
    "dots": (pack_chart({"../../evil": "x"}), "outside its folder"),
    "inner dots": (pack_chart({"a/../../../evil": "x"}), "outside its folder"),
    "absolute": (pack_chart({"/etc/evil": "x"}), "outside its folder"),
    "backslash": (pack_chart({"a\\b": "x"}), "outside its folder"),
    "symbolic link": (pack_chart({"l": _member("web/l", tarfile.SYMTYPE, "/etc/host")}), "neither a file nor a folder"),
    "hard link": (pack_chart({"l": _member("web/l", tarfile.LNKTYPE, "web/x")}), "neither a file nor a folder"),
    "device": (pack_chart({"l": _member("web/l", tarfile.CHRTYPE)}), "neither a file nor a folder"),
    "pipe": (pack_chart({"l": _member("web/l", tarfile.FIFOTYPE)}), "neither a file nor a folder"),
    "twice": (gzip.compress(gzip.decompress(pack_chart({"a": "1"}))[:1024] * 2), "cannot be unpacked"),
    "two folders": (pack_chart({"a": "1", "b/": _member("other/", tarfile.DIRTYPE)}), "more than one folder"),
    "empty": (pack_chart({}), "is empty"),
    "not gzip": (b"hello", "damaged"),
    "not tar": (gzip.compress(b"hello" * 500), "damaged"),
    "truncated": (pack_chart(chart_files())[:-20], "ends too early"),
    "half a file": (gzip.compress(gzip.decompress(pack_chart({"a": "1" * 5000}))[:2000]), "damaged"),
    "bomb": (gzip.compress(b"\0" * (MAX_UNPACKED + 1), 1), "when unpacked"),
    "many": (pack_chart({str(number): "" for number in range(MAX_FILES + 1)}), "more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", EVIL)
def test_what_is_not_unpacked(tmp_path: Path, name: str) -> None:
    data, says = EVIL[name]
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    with pytest.raises(UsageError, match=says):
        unpack(data, inside, "web.tgz")
    assert {path for path in tmp_path.rglob("*") if inside not in path.parents} == {tmp_path / "a", inside}


@given_by(st.integers(0, len(WHOLE) - 1), st.integers(0, 255), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_damaged_archive_is_an_error_or_harmless(place: int, byte: int, cut: bool) -> None:
    damaged = WHOLE[:place] if cut else WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UsageError):
        unpack(damaged, Path(folder), "web.tgz")


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    assert unpack(pack_chart(chart_files()), tmp_path, "web.tgz") == tmp_path / "web"
    assert (tmp_path / "web/templates/config.yaml").read_text() == chart_files()["templates/config.yaml"]
