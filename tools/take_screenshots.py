"""Pictures for README and docs: `python -m tools.take_screenshots [HOME]`.

Report and phases are of archives in results/archives. The dashboard shows the runs
in HOME, a data folder; without it, new runs of one task with two methods, which take some minutes. Needs chromium.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).parents[1] / "docs" / "images"
ARCHIVES = Path(__file__).parents[1] / "results" / "archives"
SHOWN = ("net-bsp-100mbit-2-*.zip", "net-eftopk-100mbit-2-*.zip")  # which method is faster on a slow link?
DRAWN = ("digits-alone-1-*.zip", "digits-bsp-2-*.zip")
CHARTS = {"phases": "time_for_all_phases"}  # here and as mlbench names them
MAX_BYTES = 100_000
COLORS = 128  # of a picture; pages have few
TASK = ("--task", "digits_resnet", "--preset", "tiny", "--repeat", "3", "--yes")
RUNS = (("own", "1", "2", *TASK), ("fused", "1", "2", *TASK, "--method", "fusion"))
WIDTH = 1200
TIMEOUT = 3600  # seconds for a command, including waiting for other runs on this machine


def main(words: Sequence[str]) -> int:
    """Make the pictures and print their paths. Fails for a picture that is too large for the repository."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        home = Path(words[0]).absolute() if words else Path(folder) / "home"
        if not words:
            for run in RUNS:
                mlbench(home, "run", *run)
        page = Path(folder) / "report.html"
        mlbench(home, "report", str(page), *(str(path) for kind in SHOWN for path in sorted(ARCHIVES.glob(kind))))
        shoot(browser, page.as_uri(), IMAGES / "report.png", 1130)
        with serve(home) as address:
            shoot(browser, address, IMAGES / "dashboard.png", 760)
        draw(home, Path(folder) / "charts")
    return check(*(IMAGES / f"{name}.png" for name in ("report", "dashboard", *CHARTS)))


def mlbench(home: Path, *words: str) -> None:
    """Run a command with its data in `home`."""
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    subprocess.run([sys.executable, "-m", "mlbench_cli", *words], env=environment, check=True, timeout=TIMEOUT)


def shoot(browser: str, address: str, target: Path, height: int) -> None:
    """A picture of the top of a page, as the browser shows it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless=new", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=9000")
        sizes = (f"--window-size={WIDTH},{height}", f"--user-data-dir={profile}", f"--screenshot={target}")
        subprocess.run([browser, *options, *sizes, address], check=True, timeout=TIMEOUT, stderr=subprocess.DEVNULL)
    reduce(target, target)


def draw(home: Path, folder: Path) -> None:
    """Figures of `mlbench charts`."""
    archives = (str(path) for kind in DRAWN for path in sorted(ARCHIVES.glob(kind)))
    mlbench(home, "charts", str(folder), *archives, "--yes")
    for name, drawn in CHARTS.items():
        reduce(folder / f"{drawn}.png", IMAGES / f"{name}.png")


def reduce(source: Path, target: Path) -> None:
    """Save a picture with few colors, which takes little space."""
    with Image.open(source) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(target, optimize=True)


@contextmanager
def serve(home: Path) -> Iterator[str]:
    """The address of a dashboard of `home`, which ends with the context."""
    words = [sys.executable, "-m", "mlbench_cli", "serve", "--port", "0", "-o", "json"]
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                line = process.stdout.readline()
                if not line:
                    raise SystemExit("the dashboard did not start")
                text += line
            address = str(json.loads(text)["url"])
            yield address
        finally:
            process.terminate()


def check(*pictures: Path) -> int:
    """Print the pictures with their sizes; 1 if one is too large."""
    for picture in pictures:
        print(f"{picture} {picture.stat().st_size:,} bytes")
    return int(any(picture.stat().st_size > MAX_BYTES for picture in pictures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
