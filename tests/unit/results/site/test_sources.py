"""Which files of a folder become entries of a site, what an entry has of its archive, and why an archive is refused."""

import hashlib
import json
import shutil
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import NotFoundError, UnprovenArchive, UsageError
from mlbench_cli.model.spec import OWN_PRICE
from mlbench_cli.results.analysis.series import measure
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.sign import OriginError, Signer
from mlbench_cli.results.archive.signature import NAMESPACE
from mlbench_cli.results.site import entries
from mlbench_cli.results.site.entries import (
    ARCHIVES,
    LFS_POINTER,
    Entry,
    Refusal,
    Withdrawal,
    find_disclosed,
    find_sources,
    read_entries,
    read_entry,
)
from mlbench_cli.results.site.judge_here import check
from tests.unit.results.runs import sealed_run

PROVENANCE: dict[str, Any] = {
    "mlbench": "4.0.0",
    "python": "3.12.1",
    "machine": {
        "platform": "Linux 6",
        "architecture": "x86_64",
        "cores": 2,
        "memory_bytes": 8 << 30,
        "cpu": "Xeon",
        "gpus": [],
    },
    "packages": {"torch": "2.9", "numpy": "2.1"},
    "command_line": ["mlbench", "run", "digits"],
    "session": "s1",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sealed run of two workers on this machine."""
    folder = tmp_path_factory.mktemp("run") / "demo"
    return sealed_run(folder, name="demo-2", seed=7, provenance=PROVENANCE)


@pytest.fixture(scope="module")
def packed(run: Path) -> Path:
    path = run.with_suffix(".zip")
    pack(run, path)
    return path


@pytest.fixture(scope="module")
def signed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A zip of it with a signature by nobody, which is correct as far as it is read without keys; and the signature."""
    folder = tmp_path_factory.mktemp("signed") / "demo"
    shutil.copytree(run, folder)
    blob = b"SSHSIG\0\0\0\1" + len(NAMESPACE).to_bytes(4, "big") + NAMESPACE.encode()
    text = f"-----BEGIN SSH SIGNATURE-----\n{b64encode(blob).decode()}\n-----END SSH SIGNATURE-----\n"
    (folder / "SHA256SUMS.sig").write_text(text)
    pack(folder, folder.with_suffix(".zip"))
    return folder.with_suffix(".zip"), text


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "site" / ARCHIVES).mkdir(parents=True)
    return tmp_path / "site"


def make_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


# --- files ----------------------------------------------------------------------------------------------------------


def test_zips_sealed_folders_and_documents_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    make_files(tmp_path, "b.zip", "a.zip", "z.json", "entry.json", "notes.txt", "zip")
    make_files(tmp_path, "d/c.zip", "c/SHA256SUMS", "c/run.json", "c/inner/x.zip", "d/receipt.json", "d/entry.json")
    found = find_sources([tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in found.archives] == ["a.zip", "b.zip", "c", "d/c.zip"]
    assert [path.relative_to(tmp_path).as_posix() for path in found.documents] == ["z.json", "d/receipt.json"]
    assert found.withdrawn == ()


def test_hidden_folders_and_an_earlier_site_are_left_out(tmp_path: Path) -> None:
    make_files(tmp_path, ".git/a.zip", "site/b.zip", "sites/c.zip", "in/site/d.zip", ".e.zip")
    found = find_sources([tmp_path], tmp_path / "site")
    assert [path.relative_to(tmp_path).as_posix() for path in found.archives] == [
        ".e.zip",
        "in/site/d.zip",
        "sites/c.zip",
    ]
    assert len(find_sources([tmp_path]).archives) == 4


def test_an_archive_that_is_named_itself_is_found_once(tmp_path: Path) -> None:
    make_files(tmp_path, "a.zip", "sealed/SHA256SUMS", "sealed/run.json", "odd.dat")
    named = [tmp_path / "odd.dat", tmp_path / "sealed", tmp_path / "a.zip", tmp_path]
    found = find_sources(named)
    assert [path.name for path in found.archives] == ["odd.dat", "sealed", "a.zip"]
    assert found.documents == ()


def test_a_folder_that_is_not_there_has_the_command_that_fills_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no folder") as caught:
        find_sources([tmp_path, tmp_path / "none"])
    assert caught.value.hint == "mlbench download NAME --to FOLDER"


# --- withdrawals ----------------------------------------------------------------------------------------------------


def line(**changes: Any) -> str:
    return json.dumps({"digest": "0f" * 32, "date": "2026-01-02", "by": "ann", "reason": "wrong clock", **changes})


def test_withdrawals_are_read_from_the_top_of_each_folder(tmp_path: Path) -> None:
    second = line(by="bob\nx", digest="a" * 64, more=1)
    text = f"{line()}\n\n  \n{second}\n"
    (tmp_path / "withdrawn.jsonl").write_text(text)
    make_files(tmp_path, "inner/a.zip")
    (tmp_path / "inner" / "withdrawn.jsonl").write_text(line(by="nobody"))
    assert find_sources([tmp_path]).withdrawn == (
        Withdrawal("0f" * 32, "2026-01-02", "ann", "wrong clock"),
        Withdrawal("a" * 64, "2026-01-02", "bob x", "wrong clock"),
    )


@pytest.mark.parametrize(
    "text",
    [
        *("no json", "[]", "1", '"x"', "{}", line(digest="0f" * 31), line(digest="0f" * 33), line(digest="0F" * 32)),
        *(line(date=20260102), line(by=None), line(reason=["x"]), line(digest=1)),
    ],
)
def test_a_line_that_is_no_withdrawal_is_refused_with_its_number(tmp_path: Path, text: str) -> None:
    (tmp_path / "withdrawn.jsonl").write_text(f"{line()}\n\n{text}\n")
    with pytest.raises(UsageError, match=r"withdrawn.jsonl, line 3: not a withdrawal\.") as caught:
        find_sources([tmp_path])
    assert '"digest": "64 HEX DIGITS"' in str(caught.value.hint)


# --- entries --------------------------------------------------------------------------------------------------------


def test_an_entry_has_the_facts_of_its_archive(packed: Path, run: Path, site: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.zip"
    shutil.copyfile(packed, path)
    (tmp_path / "entry.json").write_text('{"submitter": "ann"}')
    found = read_entry(path, site, None)
    assert isinstance(found, Entry)
    digest = hashlib.sha256((run / "SHA256SUMS").read_bytes()).hexdigest()
    with Archive.open(path) as archive:
        expected = replace(measure(archive), source=found.measurement.source)
        result = archive.result
    assert found == Entry(
        digest=digest,
        file=f"archives/demo-2-{digest[:12]}.zip",
        sha256=hashlib.sha256(packed.read_bytes()).hexdigest(),
        size=packed.stat().st_size,
        source=str(path),
        name="demo-2",
        run=result["id"],
        created="2025-10-09T08:53:19.000Z",  # a second before its start
        mlbench="4.0.0",
        seed=7,
        machine="Xeon, 2 cores",
        measurement=expected,
        price=None,
        has_own_price=False,
        energy=None,
        wall_seconds=103.0,
        summary="demo-2 reached its goal: Prec@1 80.5 (>= 80) after 100.0 s.",
        official_line=result["official_line"],
        findings=(),
        signer=None,
        origin="not signed",
        disclosed={
            "host names": ("this-host",),
            "command line": ("mlbench run digits",),
            "packages": ("numpy", "torch"),
            "session": ("s1",),
        },
        said={"submitter": "ann"},
    )
    assert (site / found.file).read_bytes() == packed.read_bytes()
    assert [each.name for each in (site / ARCHIVES).iterdir()] == [Path(found.file).name]


def test_a_sealed_folder_becomes_the_same_file_as_its_zip(packed: Path, run: Path, site: Path) -> None:
    found = read_entry(run, site, None)
    assert isinstance(found, Entry)
    assert (found.source, found.said) == (str(run), {})
    assert (site / found.file).read_bytes() == packed.read_bytes()


def test_an_entry_of_a_run_without_provenance_names_what_is_unknown(site: Path, tmp_path: Path) -> None:
    found = read_entry(sealed_run(tmp_path / "run", "failed", name="bad"), site, None)
    assert isinstance(found, Entry)
    assert (found.machine, found.price, found.has_own_price) == ("unknown machine", None, False)
    assert found.disclosed == {"host names": ("this-host",)}
    assert (found.official_line, found.summary) == (None, "bad failed. 1 of 2 ranks failed.")


@pytest.mark.parametrize(("source", "is_own"), [(OWN_PRICE["source"], True), ("price list of GCP", False)])
def test_a_price_is_that_of_the_whole_run_and_may_be_the_submitters_own(
    site: Path, tmp_path: Path, source: str, is_own: bool
) -> None:
    """103 s at 36 dollars an hour."""
    price = {"per_hour": 36.0, "currency": "USD", "source": source, "table": None}
    found = read_entry(sealed_run(tmp_path / "run", price=price), site, None)
    assert isinstance(found, Entry)
    assert found.price == pytest.approx(1.03)
    assert found.has_own_price == is_own


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda data: data[:-100], "truncated", "the zip directory ends early"),
        (lambda data: LFS_POINTER, "pointer", "it is a pointer of git LFS, not the archive: git lfs pull"),
        (lambda data: LFS_POINTER + b"v1\noid", "pointer", "it is a pointer of git LFS, not the archive: git lfs pull"),
    ],
)
def test_an_archive_that_does_not_verify_leaves_nothing_on_the_site(
    packed: Path, site: Path, tmp_path: Path, change: Callable[[bytes], bytes], code: str, words: str
) -> None:
    path = tmp_path / "bad.zip"
    path.write_bytes(change(packed.read_bytes()))
    found = read_entry(path, site, None)
    assert isinstance(found, Refusal)
    assert (found.source, found.code) == (str(path), code)
    assert words in found.message
    assert list((site / ARCHIVES).iterdir()) == []


def test_the_refusal_of_a_changed_file_names_it(packed: Path, site: Path, tmp_path: Path) -> None:
    data = bytearray(packed.read_bytes())
    with zipfile.ZipFile(packed) as zipped:
        data[zipped.getinfo("logs/rank-0.log").header_offset + 100] ^= 1
    path = tmp_path / "bad.zip"
    path.write_bytes(data)
    assert read_entry(path, site, None) == Refusal(str(path), "changed", "logs/rank-0.log: its CRC-32 is wrong")


def test_a_file_that_cannot_be_read_is_refused_with_the_systems_reason(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.zip"
    assert read_entry(path, site, None) == Refusal(
        str(path), "unreadable", "it cannot be read: No such file or directory"
    )


def test_an_archive_that_cannot_be_derived_is_refused_with_all_that_is_missing(
    packed: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Archive:
        raise UnprovenArchive(path, ("The log of rank 1 is missing.", "So is that of rank 2."))

    monkeypatch.setattr(entries, "open_verified", refuse)
    words = "The log of rank 1 is missing. So is that of rank 2."
    assert read_entry(packed, site, None) == Refusal(str(packed), "unproven", words)
    assert list((site / ARCHIVES).iterdir()) == []


def test_what_a_run_does_not_tell_is_zero_or_unknown(packed: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step of the clock there is no time of the run; and old archives lack some fields."""

    def open_old(path: Path) -> Archive:
        archive = Archive.open(path)
        archive.result["wall_seconds"] = None
        del archive.run["mlbench"], archive.run["spec"]["seed"]
        findings: list[Any] = archive.findings
        findings += [{"code": "slow", "summary": "Slow.", "hint": None}, {"code": "x", "summary": "y", "hint": "z"}]
        return archive

    monkeypatch.setattr(entries, "open_verified", open_old)
    found = read_entry(packed, site, None)
    assert isinstance(found, Entry)
    assert (found.wall_seconds, found.mlbench, found.seed) == (0.0, "unknown", 0)
    assert found.findings == (("slow", "Slow.", ""), ("x", "y", "z"))


def test_an_entry_that_says_more_than_texts_stops_the_reading(packed: Path, site: Path, tmp_path: Path) -> None:
    shutil.copyfile(packed, tmp_path / "a.zip")
    (tmp_path / "entry.json").write_text('{"submitter": 1}')
    with pytest.raises(UsageError, match='"submitter" is not a text'):
        read_entry(tmp_path / "a.zip", site, None)


def test_few_archives_are_read_in_this_process_and_many_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = []

    class Pool:
        """Does what it is asked for in this process."""

        def __enter__(self) -> "Pool":
            pools.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def map(self, function: Callable[[Any], Any], values: Iterable[Any], chunksize: int) -> Iterator[Any]:
            assert chunksize > 0
            return map(function, values)

    monkeypatch.setattr(entries, "ProcessPoolExecutor", Pool)
    paths = [tmp_path / f"{number}.zip" for number in range(24)]
    few = list(read_entries(paths[1:], tmp_path / "site", None))
    assert ([each.source for each in few], pools) == ([str(path) for path in paths[1:]], [])
    many = list(read_entries(paths, tmp_path / "site", None))
    assert ([each.source for each in many], len(pools)) == ([str(path) for path in paths], 1)
    assert list((tmp_path / "site" / ARCHIVES).iterdir()) == []


def test_a_signature_means_nothing_to_a_site_without_signers(
    signed: tuple[Path, str], packed: Path, site: Path
) -> None:
    found, plain = read_entry(signed[0], site, None), read_entry(packed, site, None)
    assert isinstance(found, Entry)
    assert isinstance(plain, Entry)
    assert (found.signer, found.origin) == (None, "signed, but this site has no signers file")
    assert found.digest == plain.digest  # of what was sealed
    assert found.sha256 != plain.sha256


def test_a_signer_of_the_site_is_named_and_any_other_has_the_reason(
    signed: tuple[Path, str], site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def check_signature(archive: Archive, signers: Path) -> Signer:
        asked.append(signers)
        if len(asked) > 1:
            raise OriginError("its key is not in the file of signers")
        return Signer("ann@example.org", "ED25519", "SHA256:0f")

    monkeypatch.setattr(entries, "check_origin", check_signature)
    good, bad = (read_entry(signed[0], site, tmp_path / "signers") for _ in range(2))
    assert isinstance(good, Entry)
    assert isinstance(bad, Entry)
    assert (good.signer, good.origin) == ("ann@example.org", "")
    assert (bad.signer, bad.origin) == (None, "its key is not in the file of signers")
    assert asked == [tmp_path / "signers"] * 2


# --- what an archive tells of people --------------------------------------------------------------------------------


def test_names_of_hosts_and_packages_are_collected_from_all_ranks(run: Path) -> None:
    archive = Archive.open(run)
    ranks: Any = {
        "0": {"host": "b", "packages": {"jax": "1"}},
        "1": {"host": "a", "packages": None},
        "2": {"host": ""},
        "3": None,
    }
    archive.environment["ranks"] = ranks
    archive.result["worker_states"][1]["node"] = "c"
    archive.result["worker_states"][0]["node"] = None
    assert find_disclosed(archive) == {
        "host names": ("a", "b", "c"),
        "command line": ("mlbench run digits",),
        "packages": ("jax", "numpy", "torch"),
        "session": ("s1",),
    }


def test_what_is_not_there_is_not_disclosed(run: Path) -> None:
    archive = Archive.open(run)
    archive.environment["ranks"] = {}
    archive.result["worker_states"] = []
    archive.run["provenance"] = None
    assert find_disclosed(archive) == {}
    archive.run["provenance"] = {"command_line": [], "packages": {}, "session": ""}
    assert find_disclosed(archive) == {}


# --- the judge in a browser -----------------------------------------------------------------------------------------


def test_the_answer_of_the_judge_has_the_figures_that_a_page_compares(packed: Path, run: Path) -> None:
    with Archive.open(packed) as archive:
        official = archive.result["official_line"]
    assert json.loads(check(str(packed))) == {
        "problems": [],
        "not_derived": [],
        "notes": [],
        "sha256": hashlib.sha256(packed.read_bytes()).hexdigest(),
        "run": "demo-2",
        "mlbench": "4.0.0",
        "seconds": 100.0,
        "summary": "demo-2 reached its goal: Prec@1 80.5 (>= 80) after 100.0 s.",
        "official": official,
        "digest": hashlib.sha256((run / "SHA256SUMS").read_bytes()).hexdigest(),
        "sums": None,
        "signature": None,
    }


def test_the_answer_about_a_damaged_archive_has_its_problems_and_no_figures(packed: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    path.write_bytes(packed.read_bytes()[:-100])
    found = json.loads(check(str(path)))
    assert sorted(found) == ["not_derived", "notes", "problems", "sha256"]
    [problem] = found["problems"]
    assert "the zip directory ends early" in problem
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_answer_about_a_signed_archive_has_what_its_signature_is_over(signed: tuple[Path, str], run: Path) -> None:
    path, signature = signed
    found = json.loads(check(str(path)))
    assert (found["problems"], found["signature"]) == ([], signature)
    assert found["sums"] == (run / "SHA256SUMS").read_text()
