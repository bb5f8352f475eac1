"""A results site: built from archives, read without JavaScript, and looked at in a real browser."""

import csv
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.archive.bundle import write_bundle
from mlbench_cli.results.archive.files import pack
from mlbench_cli.results.archive.seal import write_sums
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.results.site.build import RefusedArchives, SiteOptions, build_site
from tests.browser import open_browser
from tests.fakes.file_server import serving_folder
from tests.unit.results import runs
from tests.unit.results.analysis.test_energy import run_with, samples
from tests.unit.results.runs import sealed_run

A4 = 794  # CSS pixels of its width
METHODS: tuple[dict[str, Any], ...] = ({}, {"method": {"name": "topk"}})


def write_archives(folder: Path, workers: tuple[int, ...] = (1, 2), repeats: int = 3) -> Path:
    """Zips of runs with several sizes, methods and repeats."""
    target = folder / "archives"
    target.mkdir(parents=True)
    for size in workers:
        for number, method in enumerate(METHODS):
            for repeat in range(repeats):
                name = f"run-{size}-{number}-r{repeat + 1}"
                seconds = 90.0 / size + 5 * number + repeat
                made = sealed_run(
                    folder / name, name=name, workers=size, seconds=seconds, task="mnist", seed=42 + repeat, **method
                )
                pack(made, target / f"{name}.zip")
    return target


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archives(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def site(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    build_site([archives], folder, SiteOptions(worker_hour=0.5))
    return folder


def test_after_a_time_budget_the_lower_value_of_a_goal_with_a_maximum_comes_first(tmp_path: Path) -> None:
    """On the site and in the title of a report."""
    goal = {"metric": "Prec@1", "comparison": "<=", "threshold": 80.0, "kind": "full", "value": 90.0}
    more: dict[str, Any] = {"task": "mnist", "parameters": {"budget_seconds": 60.0}, "budget_seconds": 60.0}
    for method, last in zip(METHODS, (70.0, 90.0), strict=True):
        folder = tmp_path / f"{last:g}"
        sealed_run(folder, "budget_spent", goal={**goal, "last": last}, seconds=60.0, **more, **method)
        pack(folder, tmp_path / f"{last:g}.zip")
    archives = [str(tmp_path / "70.zip"), str(tmp_path / "90.zip")]
    build_site([*map(Path, archives)], tmp_path / "site", SiteOptions())
    listed = json.loads((tmp_path / "site" / "index.json").read_bytes())["results"]
    assert [claim["value"] for claim in listed] == [70, 90]
    assert run(["report", str(tmp_path / "page.md"), *archives]) == 0
    assert "reaches 70" in (tmp_path / "page.md").read_text().partition("\n")[0]


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with serving_folder(site) as found:
        yield found


def read_index(site: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((site / "index.json").read_text())
    return index


def test_repeats_are_one_result_with_all_of_their_archives(site: Path) -> None:
    results = read_index(site)["results"]
    assert len(results) == 4
    first = next(each for each in results if each["workers"] == 2 and each["method"] == "default")
    assert (first["value"], first["runs"]) == (pytest.approx(46.0, rel=1e-3), 3)
    assert first["low"] < 46 < first["high"]
    assert first["cost_usd"] == pytest.approx(0.5 * 2 * (46 + 3) / 3600, rel=0.01)
    for archive in first["archives"]:
        assert verify(site / archive["file"]).ok
    rows = list(csv.DictReader((site / "results.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == [each["id"] for each in results]


def test_every_link_of_every_page_leads_somewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) == 1 + 1 + 4
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"#]+)', page.read_text()):
            if not link.startswith("data:"):
                assert (page.parent / link).resolve().is_file(), (page, link)


def test_a_damaged_and_a_forged_archive_stop_the_build_or_are_listed(archives: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(archives, folder)
    damaged, forged = sorted(folder.glob("*.zip"))[:2]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    forge(forged)
    with pytest.raises(RefusedArchives, match=r"^2 archives cannot be shown"):
        build_site([folder], tmp_path / "site", SiteOptions())
    assert not (tmp_path / "site").exists()
    summary = build_site([folder], tmp_path / "site", SiteOptions(leave_out=True))
    assert len(summary.refused) == 2
    assert any("but the evidence gives" in each.message for each in summary.refused)
    page = (tmp_path / "site/index.html").read_text()
    assert "Rejected archives" in page
    assert damaged.name in page


def forge(path: Path) -> None:
    """Claim one second less than the logs say, and make all checksums fit."""
    folder = path.with_suffix("")
    shutil.unpack_archive(path, folder)
    result = folder / "result.json"
    result.write_text(re.sub(r'"wall": (\d+)', lambda found: f'"wall": {int(found[1]) - 1}', result.read_text()))
    write_sums(folder)
    path.unlink()
    pack(folder, path)
    shutil.rmtree(folder)


def test_what_one_submitter_sends_hides_no_other(tmp_path: Path) -> None:
    """An entry that is no JSON, and another archive under the id of a run; two files of several archives."""
    for place in ("anna", "bert", "carl"):
        (tmp_path / "in" / place).mkdir(parents=True)
        for number in (1, 2):
            made = sealed_run(tmp_path / place / str(number), task="mnist", name=f"{place}-2-r{number}", seed=number)
            pack(made, tmp_path / place / f"{place}-{number}.zip")
        archives = sorted((tmp_path / place).glob("*.zip"))
        write_bundle(archives, tmp_path / "in" / place / "all.zip")
    (tmp_path / "in/bert/entry.json").write_text("{")
    (tmp_path / "in/anna/entry.json").write_text('{"hardware": "a desk"}')
    stolen = tmp_path / "stolen"
    shutil.copytree(tmp_path / "anna" / "1", stolen)
    for path in (stolen / "logs").iterdir():
        path.write_text(path.read_text() + "one more line\n")
    write_sums(stolen)
    pack(stolen, tmp_path / "in" / "zed" / "stolen.zip")
    with pytest.raises(RefusedArchives, match=r"^3 archives cannot be shown"):
        build_site([tmp_path / "in"], tmp_path / "site", SiteOptions())
    found = [build_site([tmp_path / "in"], tmp_path / name, SiteOptions(leave_out=True)) for name in ("site", "again")]
    assert [sorted(Path(each.source).name for each in one.refused) for one in found] == [
        ["bert-1.zip", "bert-2.zip", "stolen.zip"]
    ] * 2
    first, second = (read_index(tmp_path / name)["results"] for name in ("site", "again"))
    assert sorted(each["submitter_says"] or "" for each in first) == ["", "a desk"]
    assert [each["id"] for each in first] == [each["id"] for each in second]


def test_a_withdrawn_archive_stays_listed_and_counts_for_nothing(archives: Path, site: Path, tmp_path: Path) -> None:
    best = min(read_index(site)["results"], key=lambda each: each["value"])
    folder = tmp_path / "in"
    shutil.copytree(archives, folder)
    lines = [
        json.dumps({"digest": each["digest"], "date": "2026-01-01", "by": "its author", "reason": "wrong clock"})
        for each in best["archives"]
    ]
    # One of its repeats is enough: a claim must be withdrawn as a whole.
    (folder / "withdrawn.jsonl").write_text(f"{lines[1]}\n")
    build_site([folder], tmp_path / "site", SiteOptions())
    found = {each["id"]: each["status"] for each in read_index(tmp_path / "site")["results"]}
    assert found[f"{best['id']}-withdrawn"] == "withdrawn"
    assert best["id"] not in found
    page = (tmp_path / "site/tasks/mnist.html").read_text()
    assert f"results/{best['id']}-withdrawn.html" in page
    assert "wrong clock" in (tmp_path / f"site/results/{best['id']}-withdrawn.html").read_text()
    assert "<s>" in page


def test_a_result_whose_runs_did_not_all_reach_the_goal_is_behind_those_that_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by cost. Its date is that of its first run."""
    for method, outcomes in (("mpi", ("goal_missed", "goal_reached")), ("gloo", ("goal_reached",) * 2)):
        for number, outcome in enumerate(outcomes):
            monkeypatch.setattr(runs, "START", 1_760_000_000.0 + 86400 * number)
            own = {"name": f"{method}-2-r{number + 1}", "backend": method, "seconds": 5.0 if method == "mpi" else 6.0}
            sealed_run(tmp_path / "in" / method / str(number), outcome, task="mnist", seed=number, **own)
    build_site([tmp_path / "in"], tmp_path / "site", SiteOptions(worker_hour=1.0))
    first, second = read_index(tmp_path / "site")["results"]
    assert [(each["value"] < 5.5, each["failed_runs"]) for each in (first, second)] == [(False, 0), (True, 1)]
    assert [each["date"] for each in (first, second)] == ["2025-10-09"] * 2
    page = (tmp_path / "site/tasks/mnist.html").read_text()
    assert f"results/{first['id']}.html" in page.partition("Lowest cost:")[2].partition("</p>")[0]


def test_what_is_not_known_of_all_repeats_is_not_said_of_their_result(tmp_path: Path) -> None:
    """Energy, a signer and a price from a list."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "signers").write_text(f"me@example.org {(tmp_path / 'key.pub').read_text()}")
    watts = samples("0:1", [100.0] * 3)
    cloud: dict[str, Any] = {"engine": "kubernetes", "cluster": "c"}
    known = run_with(
        tmp_path / "in/one", {0: watts}, **cloud, price={"per_hour": 1.5, "currency": "USD", "source": "x"}
    )
    run_with(tmp_path / "in/two", {}, **cloud)
    assert run(["verify", str(known.path), "--sign", str(tmp_path / "key")]) == 0
    options = SiteOptions(signers=tmp_path / "signers", worker_hour=1.0)
    build_site([tmp_path / "in"], tmp_path / "site", options)
    build_site([tmp_path / "in" / "one"], tmp_path / "alone", options)
    for folder, expected in (("site", [None, [], False]), ("alone", [200.0, ["me@example.org"], True])):
        (found,) = read_index(tmp_path / folder)["results"]
        assert [found[name] for name in ("energy_joules", "signers", "cost_is_list_price")] == expected


def test_foreign_text_is_no_markup(tmp_path: Path) -> None:
    made = sealed_run(tmp_path / "run", name="run-2", data='<img src=x onerror="alert(1)">', task="mnist")
    (tmp_path / "in").mkdir()
    pack(made, tmp_path / "in/run.zip")
    (tmp_path / "in/entry.json").write_text(json.dumps({"submitter": "<script>alert(1)</script>"}))
    build_site([tmp_path / "in"], tmp_path / "site", SiteOptions())
    for page in (tmp_path / "site").rglob("*.html"):
        assert "<script>alert" not in page.read_text()
        assert "<img" not in page.read_text()


def test_the_command_builds_and_says_what_archives_tell(
    archives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["site", str(archives), "--to", str(tmp_path / "of" / "mine" / "site"), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["results"], document["archives"], document["refused"]) == (4, 12, [])
    assert run(["site", str(tmp_path / "none"), "--to", str(tmp_path / "site")]) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    assert run(["site", str(archives), "--to", str(tmp_path / "mine")]) == 2
    assert "is not a results site" in capsys.readouterr().err


def test_filters_and_search_narrow_the_results(address: str) -> None:
    shown = "return document.querySelectorAll('table.list tbody tr:not([hidden])').length"
    with open_browser() as browser:
        browser.open(f"{address}/tasks/mnist.html")
        assert browser.wait_for(shown) == 4
        browser.run(
            "const s = document.querySelector('[name=workers]'); s.value = '2';"
            "s.dispatchEvent(new Event('input', {bubbles: true}))"
        )
        assert browser.run(shown) == 2
        browser.open(f"{address}/index.html")
        browser.wait_for("return !document.getElementById('search').hidden")
        browser.run("document.querySelector('[name=words]').focus()")
        browser.type("topk mnist")
        assert browser.wait_for("return document.querySelectorAll('#found a').length === 2")
        browser.type("x")
        assert browser.wait_for("return document.getElementById('found').innerText === 'No result fits.'")
        assert browser.foreign_requests() == []
        assert browser.console() == []


@pytest.mark.slow
def test_trend_and_receipts_are_drawn_on_every_width_in_the_dark_and_on_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal settings on two days with other code, the later of which reproduces the earlier."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "in"
    folder.mkdir()
    sides: list[list[str]] = []
    for day in range(2):
        monkeypatch.setattr(runs, "START", 1_760_000_000.0 + 30 * 86400 * day)
        digest = {"code_digest": str(day).ljust(64, "0")}
        sides.append([])
        for repeat in range(3):
            name = f"run-2-r{3 * day + repeat + 1}"
            seconds = 40.0 + repeat / 10 + day / 10
            made = sealed_run(tmp_path / name, name=name, task="mnist", seconds=seconds, environment=digest)
            pack(made, folder / f"{name}.zip")
            sides[day].append(str(folder / f"{name}.zip"))
    others = [word for path in sides[1] for word in ("--with", path)]
    assert run(["reproduce", *sides[0], *others, "--receipt", str(folder / "receipt.json")]) == 0
    site = tmp_path / "site"
    summary = build_site([folder], site, SiteOptions())
    assert (summary.claims, summary.receipts) == (2, 1)
    result = next(each for each in read_index(site)["results"] if each["date"] == "2025-10-09")
    marks = "return document.querySelectorAll('figure[id$=trend] > .plot .k').length"
    with serving_folder(site) as address, open_browser() as browser:
        views = [(width, scheme, "") for width in (400, 1400) for scheme in ("light", "dark")]
        for width, scheme, media in [*views, (A4, "light", "print")]:
            browser.emulate(width)
            browser.prefer(scheme, media)
            for page in ("index.html", "tasks/mnist.html", result["page"]):
                browser.open(f"{address}/{page}")
                wide = browser.run("return document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, (page, width, scheme, media)
                assert browser.console() == []
            text = browser.text()
            assert "Reproductions" in text
            assert "reproduced" in text
            assert "10 %" in text
            is_hidden = "return getComputedStyle(document.querySelector('.top nav')).display === 'none'"
            assert browser.run(is_hidden) is (media == "print")
            paper = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(17, 18, 20)") is (scheme == "dark")
        browser.open(f"{address}/tasks/mnist.html")
        assert "Over time" in browser.text()
        assert browser.run(marks) == 2


def test_pages_need_no_javascript_and_stay_small(site: Path) -> None:
    assert max(page.stat().st_size for page in site.rglob("*.html")) < 300_000
    page = (site / "tasks/mnist.html").read_text()
    assert page.count("<tr") > 4
    assert 'class="plot"' in page
