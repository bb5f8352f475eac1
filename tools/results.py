"""The archives behind the published results, in results/archives, and the certificates in results/certificates.

    python -m tools.results collect    # take the finished runs of results/experiment.yaml from the store
    python -m tools.results rejudge    # derive the documents again, after a change of the judge
    python -m tools.results readme     # write the table of README.md from the archives

Both verify what they write, and `collect` refuses failed runs: it takes all runs or none. Until a version is released,
the rules of its tasks may still grow: parameters that were added since, with their defaults, are added to the recorded
rules. Any other change of a task's rules makes its archives unprovable: run them again. `python -m tools.build_docs`
builds the site of these archives into the documentation.
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlbench_cli.api import Client
from mlbench_cli.certify.certificate import ARCHIVE, read_certificate, write_files
from mlbench_cli.errors import MlbenchError, UsageError
from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.results.archive.reseal import seal_anew
from mlbench_cli.results.archive.verify import open_verified
from mlbench_cli.storage import run_folder
from mlbench_cli.tasks.catalog import find_rules
from mlbench_cli.util.json_text import format_parsed

ROOT = Path(__file__).parents[1]
ARCHIVES = ROOT / "results" / "archives"
CERTIFICATES = ROOT / "results" / "certificates"
README = ROOT / "README.md"
BEGIN, END = "<!-- results: made by python -m tools.results readme -->", "<!-- end of results -->"
MAX_BYTES = 20_000_000  # of all archives together
PREFIX = "experiment-"
# What README compares: what was changed, and the repeats before and after; and the figures that it shows of them.
CHANGES = (
    ("100 Mbit/s instead of 1 Gbit/s", "net-bsp-1gbit", "net-bsp-100mbit"),
    ("`eftopk` instead of all-reduce, at 100 Mbit/s", "net-bsp-100mbit", "net-eftopk-100mbit"),
    ("`eftopk` instead of all-reduce, at 1 Gbit/s", "net-bsp-1gbit", "net-eftopk-1gbit"),
)
FIGURES = {"seconds": "time to the goal", "communication": "communication", "bytes sent": "bytes sent"}
PARTS = ("spec", "preset")  # of the rules: parameters by name


def collect(folder: Path) -> int:
    """Write the archives of the store's finished runs to `folder`; how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = Client().runs(contains=PREFIX)
    bad = [run.name for run in runs if not (run.is_sealed and run.outcome and run.outcome.is_success)]
    if bad:  # leaving them out would show the best runs only
        raise UsageError(
            f"{len(bad)} runs failed or have no archive: {', '.join(bad[:5])}.", hint="Repeat all of them."
        )
    for run in runs:
        with Archive.open(run.results) as archive:
            if found := archive.findings:  # a page would show it beside the numbers
                raise UsageError(f"{run.name}: {found[0]['summary']}", hint="Repeat all of them without this finding.")
            seal_anew(archive, folder / f"{run.name.removeprefix(PREFIX)}.zip", add_new_parameters)
    return len(runs)


def rejudge(folder: Path, certificates: Path) -> int:
    """Seal the archives in these folders anew from their evidence, and write the files of certificates; how many there
    are."""
    own = sorted(certificates.glob(f"*/{ARCHIVE}"))
    paths = [*sorted(folder.glob("*.zip")), *own]
    for path in paths:
        with Archive.open(path) as archive:
            seal_anew(archive, path, add_new_parameters)
    for path in own:
        write_files(read_certificate(path), path, path.parent, None)
    return len(paths)


def add_new_parameters(folder: Path) -> None:
    """Add to the recorded rules of a task those parameters that it has got since, if nothing else has changed."""
    path = folder / run_folder.RUN
    document: dict[str, Any] = json.loads(path.read_bytes())
    recorded, found = document.get("task"), find_rules(document["spec"]["task"], document["spec"]["preset"])
    if recorded is None or found is None:
        return
    today = found.to_dict()
    kept = {part: {name: today[part][name] for name in recorded[part] if name in today[part]} for part in PARTS}
    if {**today, **kept} == recorded:
        path.write_bytes(format_parsed({**document, "task": today}))


def format_readme() -> str:
    """README.md with the table of results that the archives give."""
    text = README.read_text("utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{format_table()}\n{END}{tail}"


def format_table() -> str:
    """What `mlbench compare` says of the archives behind each of CHANGES, in Markdown."""
    lines = [f"| change | {' | '.join(FIGURES.values())} |", f"| --- |{' --- |' * len(FIGURES)}"]
    for change, *names in CHANGES:
        with ExitStack() as stack:
            one, other = (
                [stack.enter_context(open_verified(path)) for path in sorted(ARCHIVES.glob(f"{name}-2-r*.zip"))]
                for name in names
            )
            rows = compare(one, other).rows
        lines.append(f"| {change} | {' | '.join(rows[name].words for name in FIGURES)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run one of the commands; 8 if the archives are too large together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["collect", "rejudge", "readme"])
    given = parser.parse_args(argv)
    if given.what == "readme":
        README.write_text(format_readme(), "utf-8")
        return 0
    try:
        count = collect(ARCHIVES) if given.what == "collect" else rejudge(ARCHIVES, CERTIFICATES)
    except MlbenchError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    size = sum(path.stat().st_size for path in ARCHIVES.glob("*.zip"))
    print(f"{count} archives, {size / 1e6:.1f} MB in {ARCHIVES}")
    return 0 if size <= MAX_BYTES else 8


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
