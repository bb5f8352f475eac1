"""Build a results site of many archives: seconds, bytes, and the largest page.

    python -m benchmarks.site [--results 2000] [--repeats 1]

The archives are those of results/archives, varied: other processors and other days, sealed again by mlbench itself, so
that each has the logs, samples and documents of a real run. Verifying them is part of what is timed.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.reseal import seal_anew
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.results.site.build import SiteOptions, build_site
from mlbench_cli.storage import run_folder
from mlbench_cli.util.json_text import format_parsed
from task_images.contract import format_event, parse_event

ARCHIVES = Path(__file__).resolve().parents[1] / "results" / "archives"
DAYS = 30  # between two variants of a result on the same machine
MOMENTS = ("time", "started", "finished")  # seconds since 1970


@cache
def find_settings() -> list[list[Path]]:
    """The published archives that today's rules prove, the repeats of a setting together."""
    paths = [path for path in sorted(ARCHIVES.glob("*.zip")) if verify(path).ok]
    return [list(group) for _, group in groupby(paths, lambda path: path.stem.rpartition("-r")[0])]


def make(number: int, repeat: int, folder: str) -> None:
    """One archive of result `number`: on the machine of its turn, or on a day of its turn with other code."""
    settings = find_settings()
    turn, kind = divmod(number, len(settings))
    source = settings[kind][repeat % len(settings[kind])]
    change = partial(vary, number=number, repeat=repeat, turn=turn)
    with Archive.open(source) as archive:
        seal_anew(archive, Path(folder, f"r{number}-{repeat}.zip"), change)


def vary(folder: Path, *, number: int, repeat: int, turn: int) -> None:
    """Change the evidence in `folder`: four days on each machine, with the code of another day each."""
    shift = timedelta(days=DAYS * (turn % 4))
    changes = {"cpu": f"Processor {turn // 4}", "code_digest": str(turn % 4).ljust(64, "0")}
    run = json.loads((folder / run_folder.RUN).read_bytes())
    name = f"r{number}-{repeat}"
    run |= {"id": f"{number:08x}{repeat:04x}", "name": name, "created": _later(run["created"], shift)}
    run["spec"]["name"] = name
    run["spec_hash"] = RunSpec.from_dict(run["spec"]).hash
    run["provenance"]["code"] = {**(run["provenance"].get("code") or {}), "digest": changes["code_digest"]}
    if run["provenance"]["machine"]:
        run["provenance"]["machine"]["cpu"] = changes["cpu"]
    (folder / run_folder.RUN).write_bytes(format_parsed(run))
    observation = folder / run_folder.OBSERVATION
    observation.write_bytes(format_parsed(_move(json.loads(observation.read_bytes()), shift)))
    _rewrite(
        folder / run_folder.RESOURCES, lambda row: json.dumps(_move(json.loads(row), shift), separators=(",", ":"))
    )
    for log in (folder / "logs").iterdir():
        _rewrite(log, lambda text: _vary_line(text, changes, shift))


def _vary_line(text: str, changes: dict[str, str], shift: timedelta) -> str:
    event = parse_event(text.encode())
    if event is None:
        return text
    moved = _move(event, shift)
    if event["event"] == "environment":
        moved |= changes
    return format_event(moved)


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    if path.is_file():
        path.write_text("".join(f"{change(line)}\n" for line in path.read_text().splitlines()))


def _move(value: Any, shift: timedelta) -> Any:
    if isinstance(value, list):
        return [_move(item, shift) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _move(item, shift) for key, item in value.items()}
    for key in MOMENTS:
        if isinstance(moved.get(key), float):
            moved[key] += shift.total_seconds()
        elif isinstance(moved.get(key), str):
            moved[key] = _later(moved[key], shift)
    return moved


def _later(moment: str, shift: timedelta) -> str:
    later = datetime.fromisoformat(moment) + shift
    return later.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found)


def make_archives(folder: Path, results: int, repeats: int = 1) -> None:
    """Write the archives of so many results to `folder`."""
    folder.mkdir(parents=True)
    work = [(number, repeat, str(folder)) for number in range(results) for repeat in range(repeats)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(make, *zip(*work, strict=True), chunksize=16))


def main() -> None:
    """Make the archives, build the site, and print what it took as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep archives and site in this new folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        archives, site = folder / "archives", folder / "site"
        make_archives(archives, given.results, given.repeats)
        begun, used = time.perf_counter(), _cpu_seconds()
        summary = build_site([archives], site, SiteOptions(worker_hour=0.05))
        print(
            json.dumps(
                {
                    "results": summary.claims,
                    "archives": summary.archives,
                    "bytes_of_archives": summary.bytes,
                    "seconds": round(time.perf_counter() - begun, 1),
                    "cpu_seconds": round(_cpu_seconds() - used, 1),
                    "bytes_of_site": sum(path.stat().st_size for path in site.rglob("*") if path.is_file()),
                    "largest_page_bytes": summary.largest_page,
                }
            )
        )


if __name__ == "__main__":
    main()
