"""Which names and files an archive may have, and the list of their digests."""

import hashlib
import io
import os
import stat
from pathlib import Path

import pytest

from mlbench_cli.errors import DamagedArchive, MlbenchError, UsageError
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.layout import (
    CHUNK,
    digest,
    find_collisions,
    find_name_problem,
    find_portability_problem,
    format_sums,
    is_in_layout,
    log_names,
    make_portable,
    naming_file_on_os_error,
    parse_sums,
    portable_part,
    remove_temporary_files,
    walk,
    write_sums,
)

HASH = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "output/a/b.txt",
        "output/.hidden",
        "output/..two-dots",
        "logs/rank-0.log",
        "a b",
        "ü",
        "x" * 255,
        "/".join(["x" * 255] * 4),  # 1023 bytes
        "y" + "/".join(["x" * 254, *["x" * 255] * 3]),
        "é" * 127,
    ],
)
def test_ordinary_names_are_allowed_up_to_255_bytes_a_part_and_1024_in_all(name: str) -> None:
    assert find_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "the name is empty"),
        ("/etc/passwd", "the name is absolute"),
        ("a\nb", "the name contains a control character, a backslash or invalid UTF-8"),
        ("a\x7f", "the name contains a control character, a backslash or invalid UTF-8"),
        ("a\\b", "the name contains a control character, a backslash or invalid UTF-8"),
        ("a\udcff", "the name contains a control character, a backslash or invalid UTF-8"),
        ("output/../run.json", 'the name contains an empty part, "." or ".."'),
        ("./run.json", 'the name contains an empty part, "." or ".."'),
        ("output//a", 'the name contains an empty part, "." or ".."'),
        ("output/", 'the name contains an empty part, "." or ".."'),
        (".state", "archives cannot contain hidden files"),
        ("logs/.hidden", "archives cannot contain hidden files"),
        ("x" * 256, "the name is too long"),
        ("é" * 128, "the name is too long"),
        ("/".join([*["x" * 255] * 4, "y"]), "the name is too long"),
    ],
)
def test_names_that_are_unsafe_are_refused_with_the_reason(name: str, problem: str) -> None:
    assert find_name_problem(name) == problem


@pytest.mark.parametrize("name", ["a", "output/a.txt", "output/conch", "output/com", "output/com10", "output/.b", "ü"])
def test_names_that_every_system_can_store_are_portable(name: str) -> None:
    assert find_portability_problem(name) is None


@pytest.mark.parametrize(
    "name",
    ["output/con", "output/AUX.txt", "nul/x", "output/lpt1", "output/COM0.a.b", "a.", "b /c", "what?", "a:b", "a|b"],
)
def test_names_that_windows_reserves_are_not_portable(name: str) -> None:
    assert find_portability_problem(name) == "Windows does not allow this file name"


@pytest.mark.parametrize("character", ["\u0085", "\u202e", "\u2066", "\ufeff", "\u2028"])
def test_names_that_are_displayed_as_others_are_not_portable(character: str) -> None:
    assert find_portability_problem(f"output/a{character}b") == "the name contains a control or bidirectional character"


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("run.json", True),
        ("network.json", True),
        ("shaping.json", True),
        ("faults.json", True),
        ("observation.json", True),
        ("SHA256SUMS", True),
        ("SHA256SUMS.sig", True),
        ("output/anything", True),
        ("manifests/job.yaml", True),
        ("logs/rank-0.log", True),
        ("logs/rank-12.log", True),
        ("logs/rank-01.log", False),
        ("logs/rank-0.log.old", False),
        ("output", False),
        ("extra.json", False),
        ("more/run.json", False),
    ],
)
def test_an_archive_has_a_fixed_set_of_places(name: str, belongs: bool) -> None:
    assert is_in_layout(name) is belongs


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a", "b"], {}),
        (["A", "a"], {"a": "A"}),
        (["output/Readme", "output/README"], {"output/Readme": "output/README"}),
        (["e\u0301", "\u00e9"], {"\u00e9": "e\u0301"}),
        (["stra\u00dfe", "STRASSE"], {"stra\u00dfe": "STRASSE"}),
        (["a", "A/b"], {"a": "A/b"}),  # a file and a folder
        (["A", "a/b/c"], {"a/b/c": "A"}),
        (["A/b", "a/c"], {}),  # files of one folder, whose names do not collide
        (["x", "X", "x/y"], {"x": "X", "x/y": "X"}),
    ],
)
def test_names_that_differ_only_in_case_or_normalization_collide(names: list[str], found: dict[str, str]) -> None:
    assert find_collisions(names) == found
    assert find_collisions(reversed(names)) == found


@pytest.mark.parametrize(
    ("part", "portable"),
    [
        ("plain.txt", "plain.txt"),
        ("a:b", "a%3Ab"),
        ("a\nb", "a%0Ab"),
        ("a\\b", "a%5Cb"),
        ("\udcff", "%FF"),
        ("\u202e", "%E2%80%AE"),
        ("end.", "end%2E"),
        ("end ", "end%20"),
        ("a. b", "a. b"),
        ("con", "%63on"),
        ("nul.txt", "%6Eul.txt"),
        ("x" * 255, "x" * 255),
    ],
)
def test_invalid_characters_become_their_bytes_in_hexadecimal(part: str, portable: str) -> None:
    assert portable_part(part) == portable


@pytest.mark.parametrize("part", ["x" * 256, "é" * 200, ":" * 100])
def test_a_name_that_is_too_long_is_cut_and_stays_unique(part: str) -> None:
    written = "".join(f"%{ord(char):02X}" if char == ":" else char for char in part)
    short = portable_part(part)
    assert 253 <= len(short.encode()) <= 255
    assert written.startswith(short[:-17])
    assert short.endswith("-" + hashlib.sha256(written.encode()).hexdigest()[:16])
    assert portable_part(f"{part}y")[-17:] != short[-17:]


def test_hidden_files_are_in_an_archive_only_below_its_output(tmp_path: Path) -> None:
    for name in ("run.json", ".state/pid", "logs/.tmp", "logs/rank-0.log", "output/.hidden/file", "output/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "output/link").symlink_to("a")
    (tmp_path / "output/folder").symlink_to(tmp_path / "logs")
    found = dict(walk(tmp_path))
    assert sorted(found) == [
        *("logs/rank-0.log", "output/.hidden/file", "output/a", "output/folder", "output/link", "run.json"),
    ]
    assert [name for name, mode in found.items() if stat.S_ISLNK(mode)] == [
        name for name in found if name in ("output/link", "output/folder")
    ]


def test_only_temporary_files_of_documents_are_removed(tmp_path: Path) -> None:
    gone = (".run.json.1.tmp", ".observation.json.x.tmp", ".SHA256SUMS.abc.tmp", ".findings.json.9.tmp")
    kept = (".other.json.1.tmp", ".run.json.tmp", "run.json", "run.json.1.tmp")
    for name in (*gone, *kept):
        (tmp_path / name).write_text("x")
    remove_temporary_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_files_that_cannot_be_in_an_archive_are_renamed_or_put_aside_and_named(tmp_path: Path) -> None:
    for name in ("run.json", "notes.txt", "output/a:b", "output/Readme", "output/README"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "output/link").symlink_to("Readme")
    findings = [(finding.code, finding.summary) for finding in make_portable(tmp_path)]
    other = f"output/renamed-{hashlib.sha256(b'output/Readme').hexdigest()[:32]}"
    assert findings == [
        ("file_left_out", "notes.txt does not belong in an archive."),
        ("file_renamed", f"output/Readme is now {other}: on some systems it is the same as output/README."),
        ("file_renamed", "output/a:b is now output/a%3Ab: Windows does not allow this file name."),
        ("file_left_out", "output/link is not a regular file; archives contain only regular files."),
    ]
    assert (tmp_path / other).read_text() == "output/Readme"
    assert (tmp_path / "output/a%3Ab").read_text() == "output/a:b"
    assert (tmp_path / ".state/left_out/notes.txt").read_text() == "notes.txt"
    assert os.readlink(tmp_path / ".state/left_out/output%2Flink") == "Readme"
    assert make_portable(tmp_path) == []


def test_a_new_name_does_not_replace_a_file_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    for name in ("a:b", "a%3Ab"):
        (tmp_path / "output" / name).write_text(name)
    make_portable(tmp_path)
    assert (tmp_path / "output/a%3Ab").read_text() == "a%3Ab"
    (renamed,) = (tmp_path / "output").glob("renamed-*")
    assert renamed.read_text() == "a:b"


def test_files_and_folders_without_permissions_become_readable_for_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "output" / "deep"
    folder.mkdir(parents=True)
    (folder / "a").write_text("x")
    (folder / "a").chmod(0o040)
    folder.chmod(0o050)
    make_portable(tmp_path)
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o440
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_logs_are_in_the_order_of_their_ranks() -> None:
    names = ["logs/rank-10.log", "logs/rank-2.log", "run.json", "logs/rank-0.log", "logs/rank-00.log"]
    assert list(log_names(names).items()) == [
        (0, "logs/rank-0.log"),
        (2, "logs/rank-2.log"),
        (10, "logs/rank-10.log"),
    ]


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1])
def test_a_digest_is_the_sha256_of_the_rest_of_a_file(size: int) -> None:
    file = io.BytesIO(b"read" + b"x" * size)
    file.read(4)
    assert digest(file) == hashlib.sha256(b"x" * size).hexdigest()


def test_the_list_of_digests_is_what_sha256sum_reads(tmp_path: Path) -> None:
    for name in ("b", "a", "SHA256SUMS.sig", ".hidden"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    lines = [f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in ("a", "b")]
    assert (tmp_path / "SHA256SUMS").read_text() == "".join(lines)
    assert not (tmp_path / "SHA256SUMS.sig").exists()
    write_sums(tmp_path)  # the list does not list itself
    assert (tmp_path / "SHA256SUMS").read_text() == "".join(lines)


def test_a_list_of_digests_is_read_as_it_was_written() -> None:
    digests = {"b c": HASH, "a": HASH[::-1], "output/ü": HASH}
    assert format_sums(digests).decode() == f"{HASH[::-1]}  a\n{HASH}  b c\n{HASH}  output/ü\n"
    assert parse_sums(format_sums(digests), "x") == digests
    assert parse_sums(b"", "x") == {}


@pytest.mark.parametrize(
    ("data", "problem", "message"),
    [
        (b"\xff\xfe", "malformed_sums", "it is not UTF-8"),
        (f"{HASH}  ../a\n".encode(), "unsafe_name", "it lists '../a': the name contains an empty part"),
        (f"{HASH}  SHA256SUMS\n".encode(), "malformed_sums", "it lists itself"),
        (f"{HASH}  SHA256SUMS.sig\n".encode(), "malformed_sums", "it lists its own signature"),
        (f"{HASH}  b\n{HASH}  a\n".encode(), "malformed_sums", "it is not a sorted list of digests"),
        (f"{HASH}  a".encode(), "malformed_sums", "it is not a sorted list of digests"),
        (f"{HASH} *a\n".encode(), "malformed_sums", "it is not a sorted list of digests"),
        (f"{HASH.upper()}  a\n".encode(), "malformed_sums", "it is not a sorted list of digests"),
        (f"{HASH}  a\n{HASH}  a\n".encode(), "malformed_sums", "it is not a sorted list of digests"),
        (f"{HASH}  a\n\n".encode(), "malformed_sums", "it is not a sorted list of digests"),
    ],
)
def test_any_other_list_of_digests_is_refused(data: bytes, problem: str, message: str) -> None:
    with pytest.raises(DamagedArchive) as caught:
        parse_sums(data, "some/archive")
    assert (caught.value.problem, caught.value.file) == (problem, "SHA256SUMS")
    assert caught.value.plain.startswith(message)
    if "itself" in message or "signature" in message:
        assert caught.value.plain == message


def test_an_error_of_the_system_names_the_file() -> None:
    with (
        pytest.raises(MlbenchError, match=r"^/there cannot be read: No space left on device\."),
        naming_file_on_os_error(Path("/here"), "read"),
    ):
        raise OSError(28, "No space left on device", "/there")
    with (
        pytest.raises(MlbenchError, match=r"^/here cannot be written: something\."),
        naming_file_on_os_error(Path("/here"), "written"),
    ):
        raise OSError("something")


def test_folders_with_invalid_names_are_renamed_with_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "output" / "a:b" / "CON"
    folder.mkdir(parents=True)
    for name in ("x", "y"):
        (folder / name).write_text(name)
    assert [finding.code for finding in make_portable(tmp_path)] == ["file_renamed"] * 2
    for name in ("x", "y"):
        assert (tmp_path / "output" / "a%3Ab" / "%43ON" / name).read_text() == name


def test_the_target_of_a_link_to_a_folder_keeps_its_permissions(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (folder / "output").mkdir(parents=True)
    (folder / "output" / "link").symlink_to(outside)
    outside.chmod(0o500)
    make_portable(folder)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500


@pytest.mark.parametrize(("mode", "after"), [(0o100, 0o500), (0o200, 0o600), (0o640, 0o640), (0o444, 0o444)])
def test_only_the_right_to_read_is_added(tmp_path: Path, mode: int, after: int) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "a").touch()
    (tmp_path / "output" / "a").chmod(mode)
    make_portable(tmp_path)
    assert stat.S_IMODE((tmp_path / "output" / "a").stat().st_mode) == after


def test_the_list_of_digests_is_written_when_all_files_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seals the folder: after a crash, a folder with it must have everything that it lists."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def rename(old: Path, new: Path) -> None:
        done.append(f"rename to {Path(new).name}")
        replace(old, new)

    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_sums(tmp_path)
    assert done == ["sync folder", "sync file", "sync file", "rename to SHA256SUMS", "sync folder"]


@pytest.mark.parametrize(("count", "fits"), [(2, True), (3, False)])
def test_an_archive_has_a_limited_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, fits: bool
) -> None:
    """With SHA256SUMS it may have just as many as a zip that is read."""
    monkeypatch.setattr(layout, "MAX_FILES", 3)
    (tmp_path / "output").mkdir()
    for number in range(count):
        (tmp_path / "output" / str(number)).touch()
    if fits:
        write_sums(tmp_path)
        assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 2
        return
    with pytest.raises(UsageError, match="has more than 3 files, the limit of an archive") as caught:
        write_sums(tmp_path)
    assert str(tmp_path / "output") in str(caught.value.hint)
    assert not (tmp_path / "SHA256SUMS").exists()


def test_an_old_signature_and_list_are_not_listed(tmp_path: Path) -> None:
    for name in ("run.json", "SHA256SUMS", "SHA256SUMS.sig"):
        (tmp_path / name).write_text("x")
    write_sums(tmp_path)
    assert [line.split("  ")[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()] == ["run.json"]
    assert not (tmp_path / "SHA256SUMS.sig").exists()
