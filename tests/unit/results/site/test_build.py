"""A site that is built: its files, its index and table, what is refused, and what an output folder may hold."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.reproduction import judge_reproduction
from mlbench_cli.results.archive.pack import pack
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.receipts import make_receipt, write_receipt
from mlbench_cli.results.site.build import CSV_HEAD, RefusedArchives, SiteOptions, build_site, refuse
from mlbench_cli.results.site.entries import Refusal
from mlbench_cli.results.site.pages import page_name
from tests.unit.results.runs import sealed_run


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with zips: three repeats on two workers, and a run of another setting."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "in").mkdir()
    for number, seconds in enumerate((40.0, 41.0, 42.0, 90.0), 1):
        name = f"run-r{number}"
        fields: dict[str, Any] = {"name": name, "seconds": seconds, "task": "mnist", "seed": number}
        made = sealed_run(folder / name, **fields, workers=1 if number == 4 else 2)
        pack(made, folder / "in" / f"{name}.zip")
    return folder / "in"


@pytest.fixture(scope="module")
def site(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    build_site([archives], folder, SiteOptions(title="Mine & yours", worker_hour=0.5))
    return folder


def index_of(site: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((site / "index.json").read_text())
    return document


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_site_has_a_page_for_each_task_and_claim(site: Path) -> None:
    ids = [each["id"] for each in index_of(site)["results"]]
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    assert pages == sorted(["index.html", "tasks/mnist.html", *(f"results/{each}.html" for each in ids)])
    assert sorted(path.name for path in site.iterdir()) == [
        *("archives", "assets", "data", "index.html", "index.json", "results", "results.csv", "tasks"),
    ]
    assert [path.name for path in (site / "assets").iterdir()] == ["site.css", "site.js"] or sorted(
        path.name for path in (site / "assets").iterdir()
    ) == ["site.css", "site.js"]
    assert "Mine &amp; yours" in (site / "index.html").read_text()


def test_every_claim_has_the_data_of_its_figures(site: Path) -> None:
    for each in index_of(site)["results"]:
        files = list((site / "data").glob(f"{each['id']}-*.csv"))
        assert files
        assert files[0].read_text().startswith("line,")


def test_the_index_is_for_programs(site: Path) -> None:
    index = index_of(site)
    results = index.pop("results")
    assert index == {
        "version": 1,
        "mlbench": __version__,
        "title": "Mine & yours",
        "worker_hour_usd": 0.5,
        "judge": None,
        "judges": {},
    }
    assert [(each["workers"], each["runs"], each["value"]) for each in results] == [(2, 3, 41.0), (1, 1, 90.0)]
    assert results[0]["cost_usd"] == pytest.approx(0.5 * 2 * 44 / 3600)  # with 3 s until the ranks have ended
    assert (site / "index.json").read_text().endswith("}\n")


def test_the_table_has_a_row_per_claim_and_lists_as_words(site: Path) -> None:
    rows = list(csv.reader((site / "results.csv").read_text().splitlines()))
    assert tuple(rows[0]) == CSV_HEAD
    first = dict(zip(CSV_HEAD, rows[1], strict=True))
    assert len(rows) == 3
    assert (first["workers"], first["value"], first["unit"], first["runs"], first["failed_runs"]) == (
        *("2", "41.0", "s", "3", "0"),
    )
    assert (first["status"], first["date"], first["task"], first["preset"]) == ("stands", "2025-10-09", "mnist", "spec")
    assert (first["network"], first["signers"], first["conditions"], first["energy_joules"]) == ("", "", "", "")


def test_the_summary_counts_what_was_built(archives: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = build_site([archives], tmp_path / "site", SiteOptions(), said.append)
    assert (found.claims, found.archives, found.receipts, found.refused) == (2, 4, 0, [])
    assert found.bytes == sum(path.stat().st_size for path in archives.iterdir())
    assert found.largest_page == max(path.stat().st_size for path in (tmp_path / "site").rglob("*.html"))
    assert found.disclosed == {"host names": {"this-host"}}
    assert said == ["4 of 4 archives verified"]


def test_an_archive_that_lies_there_twice_counts_once(archives: Path, tmp_path: Path) -> None:
    shutil.copytree(archives, tmp_path / "in")
    shutil.copyfile(archives / "run-r1.zip", tmp_path / "in" / "copy.zip")
    found = build_site([tmp_path / "in"], tmp_path / "site", SiteOptions())
    assert (found.archives, len(list((tmp_path / "site" / "archives").iterdir()))) == (4, 4)


def test_signers_are_published_with_the_site(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "signers").write_text("ann@example.org ssh-ed25519 AAAA\n")
    build_site([archives / "run-r1.zip"], tmp_path / "site", SiteOptions(signers=tmp_path / "signers"))
    assert (tmp_path / "site" / "allowed_signers").read_text() == "ann@example.org ssh-ed25519 AAAA\n"


@pytest.mark.parametrize(("number", "name"), [(1, "tasks/mnist.html"), (2, "tasks/mnist-2.html")])
def test_further_pages_of_a_task_are_numbered(number: int, name: str) -> None:
    assert page_name("mnist", number) == name


# --- the output folder ----------------------------------------------------------------------------------------------


def test_an_earlier_site_and_an_empty_folder_are_replaced(archives: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "site"
    output.mkdir(parents=True)
    build_site([archives / "run-r1.zip"], output, SiteOptions())
    (output / "stray").touch()
    build_site([archives / "run-r4.zip"], output, SiteOptions())
    assert not (output / "stray").exists()
    assert [each["workers"] for each in index_of(output)["results"]] == [1]
    assert [path.name for path in output.parent.iterdir()] == ["site"]  # neither the old nor a temporary folder


def test_other_files_are_never_replaced(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    (tmp_path / "file").touch()
    for output in (tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(UsageError, match="exists and is not a results site") as caught:
            build_site([archives], output, SiteOptions())
        assert caught.value.hint == "Name a new folder with --output."
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_folder_without_archives_has_the_command_that_fetches_some(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(UsageError) as caught:
        build_site([tmp_path / "a", tmp_path / "b"], tmp_path / "site", SiteOptions())
    assert caught.value.message == f"There is no archive in {tmp_path / 'a'} or {tmp_path / 'b'}."
    assert caught.value.hint == "mlbench download NAME --to FOLDER"


def test_a_site_within_its_own_archives_is_not_read(archives: Path, tmp_path: Path) -> None:
    shutil.copytree(archives, tmp_path / "in")
    for _ in range(2):
        found = build_site([tmp_path / "in"], tmp_path / "in" / "site", SiteOptions())
        assert found.archives == 4


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "1 archive cannot be shown: f0: why 0."),
        (3, "3 archives cannot be shown: f0: why 0; f1: why 1; f2: why 2."),
        (5, "5 archives cannot be shown: f0: why 0; f1: why 1; f2: why 2; and 2 more."),
    ],
)
def test_the_first_three_refused_archives_are_in_the_message_and_all_in_the_details(count: int, message: str) -> None:
    error = refuse([Refusal(f"f{number}", "changed", f"why {number}") for number in range(count)])
    assert (error.message, error.exit_code, error.code) == (message, 7, "refused_archives")
    assert error.hint == "Remove them, or add --leave-out to build the site without them."
    assert error.details["refused"][-1] == {
        "source": f"f{count - 1}",
        "code": "changed",
        "message": f"why {count - 1}",
    }


def test_a_refused_archive_stops_the_build_unless_it_may_be_left_out(archives: Path, tmp_path: Path) -> None:
    shutil.copytree(archives, tmp_path / "in")
    (tmp_path / "in" / "bad.zip").write_bytes(b"no zip")
    said: list[str] = []
    with pytest.raises(RefusedArchives):
        build_site([tmp_path / "in"], tmp_path / "site", SiteOptions(), said.append)
    assert said == ["4 of 5 archives verified"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    found = build_site([tmp_path / "in"], tmp_path / "site", SiteOptions(leave_out=True))
    assert ([Path(each.source).name for each in found.refused], found.archives) == (["bad.zip"], 4)


# --- receipts -------------------------------------------------------------------------------------------------------


def receipt_of(archives: Path, path: Path) -> dict[str, Any]:
    """A receipt that the third repeat reproduces the first two."""
    with (
        Archive.open(archives / "run-r1.zip") as one,
        Archive.open(archives / "run-r2.zip") as two,
        Archive.open(archives / "run-r3.zip") as three,
    ):
        document: dict[str, Any] = dict(make_receipt([one, two], [three], judge_reproduction([one, two], [three], 0.5)))
    write_receipt(path, document)
    return document


def test_a_receipt_that_follows_from_archives_of_the_site_belongs_to_its_claims(archives: Path, tmp_path: Path) -> None:
    shutil.copytree(archives, tmp_path / "in")
    receipt_of(archives, tmp_path / "in" / "receipt.json")
    (tmp_path / "in" / "other.json").write_text('{"kind": "other"}')
    found = build_site([tmp_path / "in"], tmp_path / "site", SiteOptions())
    assert (found.receipts, found.refused) == (1, [])
    [file] = (tmp_path / "site" / "receipts").iterdir()
    assert file.read_bytes() == (tmp_path / "in" / "receipt.json").read_bytes()
    named = [each["receipts"] for each in index_of(tmp_path / "site")["results"]]
    assert named == [[f"receipts/{file.name}"], []]


def test_a_receipt_about_archives_that_are_missing_is_refused(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copyfile(archives / "run-r1.zip", tmp_path / "in" / "run-r1.zip")
    document = receipt_of(archives, tmp_path / "in" / "receipt.json")
    found = build_site([tmp_path / "in"], tmp_path / "site", SiteOptions(leave_out=True))
    [refusal] = found.refused
    missing = document["original"][1]["digest"]
    assert refusal == (
        str(tmp_path / "in" / "receipt.json"),
        "receipt",
        f"it names 2 archives that are missing here, e.g. {missing[:16]}...",
    )
    with pytest.raises(RefusedArchives, match=r"receipt\.json"):
        build_site([tmp_path / "in"], tmp_path / "site", SiteOptions())


def test_a_receipt_with_another_verdict_than_its_archives_give_is_refused(archives: Path, tmp_path: Path) -> None:
    shutil.copytree(archives, tmp_path / "in")
    document = receipt_of(archives, tmp_path / "in" / "receipt.json")
    write_receipt(tmp_path / "in" / "receipt.json", {**document, "margin": 0.4})
    found = build_site([tmp_path / "in"], tmp_path / "site", SiteOptions(leave_out=True))
    assert found.receipts == 0
    assert found.refused[0].message.startswith("it does not follow from its archives: ")
    assert not (tmp_path / "site" / "receipts").exists()
