"""Pictures of every page: `python -m tools.take_screenshots [--all FOLDER] [HOME]`.

Without `--all`, the few that README and docs show, in docs/images. With it, each kind of page in FOLDER, to look at:
400 and 1400 px wide, light and dark, and as PDF. Reports, certificates and the site are of results/, the dashboard
shows the runs in HOME, a data folder; without it, new runs of one task with two methods, and one that fails, which take
some minutes. Needs chromium and chromedriver.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from tests.browser import Browser, open_browser

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
ARCHIVES = ROOT / "results" / "archives"
CERTIFICATES = ROOT / "results" / "certificates"
SHOWN = ("net-bsp-100mbit-2-*.zip", "net-eftopk-100mbit-2-*.zip")  # which method is faster on a slow link?
DRAWN = ("digits-alone-1-*.zip", "digits-bsp-2-*.zip")
MAX_BYTES = 100_000
COLORS = 128  # of a picture; pages have few
TASK = ("--task", "digits_resnet", "--preset", "tiny", "--repeat", "3")
RUNS = (("own", "1", "2", *TASK), ("fused", "1", "2", *TASK, "--method", "fusion"))
FAILING = ("broken", "2", "--command", 'python -c \'print("loading"); raise MemoryError("out of memory")\'')
WIDTH = 1200
TIMEOUT = 3600  # seconds for a command, including waiting for other runs on this machine


def main() -> int:
    """Make the pictures and print their paths. Fails for a picture that is too large for the repository."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="every page, to look at")
    parser.add_argument("home", nargs="?", type=Path, metavar="HOME", help="data folder with the runs to show")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = (words.home or Path(folder) / "home").absolute()
        if not words.home:
            for run in RUNS:
                mlbench(home, "run", *run, "--yes")
            if words.all:
                mlbench(home, "run", *FAILING, "--yes", may_fail=True)
        with open_browser() as browser, serve(home, *(("--allow-actions",) if words.all else ())) as address:
            if words.all:
                pages = {**list_pages(home, address), **write_pages(home, Path(folder))}
                words.all.mkdir(parents=True, exist_ok=True)
                for name, page in pages.items():
                    shoot_all(browser, page, words.all / name)
                return 0
            page = write_report(home, Path(folder) / "report.html", *SHOWN)
            shoot(browser, page, IMAGES / "report.png", 1130)
            shoot(browser, address, IMAGES / "dashboard.png", 760)
    return check(*(IMAGES / f"{name}.png" for name in ("report", "dashboard")))


def mlbench(home: Path, *words: str, may_fail: bool = False) -> None:
    """Run a command with its data in `home`."""
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "mlbench_cli", *words], env=environment, check=not may_fail, timeout=TIMEOUT)


# --- pages ------------------------------------------------------------------------------------------------------------


def write_report(home: Path, page: Path, *kinds: str) -> str:
    """The address of a report of archives."""
    mlbench(home, "report", str(page), *(str(path) for kind in kinds for path in sorted(ARCHIVES.glob(kind))))
    return page.as_uri()


def write_pages(home: Path, folder: Path) -> dict[str, str]:
    """Reports, certificates and the site, by name."""
    site = folder / "site"
    mlbench(home, "site", str(ARCHIVES), "--to", str(site))
    return {
        "report-run": write_report(home, folder / "run.html", "digits-alone-1-r1.zip"),
        "report-experiment": write_report(home, folder / "experiment.html", *DRAWN, "digits-p*.zip"),
        "report-comparison": write_report(home, folder / "comparison.html", *SHOWN),
        **{f"certificate-{page.parent.name}": page.as_uri() for page in CERTIFICATES.glob("*/certificate.html")},
        "site-index": (site / "index.html").as_uri(),
        "site-task": next(site.glob("tasks/*.html")).as_uri(),
        "site-result": next(site.glob("results/*.html")).as_uri(),
    }


def list_pages(home: Path, address: str) -> dict[str, str]:
    """The pages of a dashboard by name."""
    command = [sys.executable, "-m", "mlbench_cli", "status", "-o", "json"]
    listed = subprocess.run(
        command, env={**os.environ, "MLBENCH_HOME": str(home)}, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT
    )
    runs = json.loads(listed.stdout)["runs"]
    base = address.partition("?")[0].rstrip("/")
    pages = {
        "dashboard": address,
        **{f"dashboard-{name}": f"{base}/{name}" for name in ("new", "experiments", "clusters")},
    }
    for kind, is_failed in (("run", False), ("failed-run", True)):
        found = [run["name"] for run in runs if (run["outcome"] == "failed") is is_failed]
        pages |= {f"dashboard-{kind}": f"{base}/runs/{found[0]}"} if found else {}
    for name in [run["name"].removesuffix("-1-r1") for run in runs if run["name"].endswith("-1-r1")][:1]:
        pages["dashboard-experiment"] = f"{base}/experiments/{name}"
        pages["dashboard-compare"] = f"{base}/compare?a={name}-1&b={name}-2"
    return pages


@contextmanager
def serve(home: Path, *words: str) -> Iterator[str]:
    """The address of a dashboard of `home`, which ends with the context."""
    command = [sys.executable, "-m", "mlbench_cli", "serve", "--port", "0", "-o", "json", *words]
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                line = process.stdout.readline()
                if not line:
                    raise SystemExit("the dashboard did not start")
                text += line
            yield str(json.loads(text)["url"])
        finally:
            process.terminate()


# --- pictures ---------------------------------------------------------------------------------------------------------


def shoot(browser: Browser, address: str, target: Path, height: int) -> None:
    """A picture of the top of a page."""
    browser.emulate(WIDTH, height)
    open_page(browser, address)
    browser.screenshot(target)
    reduce(target, target)


def shoot_all(browser: Browser, address: str, target: Path) -> None:
    """Whole pictures of a page in each width and scheme, and the page as printed."""
    for scheme in ("light", "dark"):
        for width in (400, 1400):
            browser.prefer(scheme)
            browser.emulate(width)
            open_page(browser, address)
            browser.emulate(width, min(16_000, int(browser.run("return document.documentElement.scrollHeight"))))
            browser.screenshot(target.with_name(f"{target.name}-{width}-{scheme}.png"))
    browser.prefer("light")
    target.with_name(f"{target.name}.pdf").write_bytes(browser.print_pdf())
    print(target, flush=True)


def open_page(browser: Browser, address: str) -> None:
    """Open a page and wait for the parts that it loads later."""
    browser.open(address)
    browser.wait_for(
        "return document.readyState === 'complete' && !document.querySelector('#listing:not([data-loaded])')"
    )


def reduce(source: Path, target: Path) -> None:
    """Save a picture with few colors, which takes little space."""
    with Image.open(source) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(target, optimize=True)


def check(*pictures: Path) -> int:
    """Print the pictures with their sizes; 1 if one is too large."""
    for picture in pictures:
        print(f"{picture} {picture.stat().st_size:,} bytes")
    return int(any(picture.stat().st_size > MAX_BYTES for picture in pictures))


if __name__ == "__main__":
    sys.exit(main())
