"""`mlbench gate`: check results against a baseline, for CI."""

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.api.sources import find_archives_below
from mlbench_cli.commands._archives import Across, Unproven, open_archives
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import CannotTellError, NotFoundError, naming_file_on_os_error
from mlbench_cli.results.analysis import gate as gates
from mlbench_cli.results.analysis import gate_files
from mlbench_cli.results.analysis.comparability import check_words
from mlbench_cli.results.analysis.gate import Direction
from mlbench_cli.results.analysis.stats import Verdict
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.files import write_atomically


def gate(
    results: Annotated[
        list[str],
        typer.Argument(metavar="RESULT...", help="runs, experiments or archives", autocompletion=complete_names),
    ],
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline",
            metavar="FOLDER|NAME",
            help="folder with archives, or a run or experiment, to compare them with",
            autocompletion=complete_names,
        ),
    ],
    checks: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            metavar="METRIC=LIMIT",
            help="figure to check and by how much it may be worse, as a factor or a share: seconds=1.1, seconds=+10%, "
            "accuracy=+2%; or convergence; repeatable; default: seconds=+10%",
        ),
    ] = None,
    direction: Annotated[
        Direction | None,
        typer.Option("--direction", help="which direction is better for metrics whose name does not tell"),
    ] = None,
    allows_undecided: Annotated[
        bool, typer.Option("--allow-undecided", help="exit with 0 instead of 9 if a check cannot be decided")
    ] = False,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="also write JUnit XML")] = None,
    benchmark: Annotated[
        Path | None,
        typer.Option(
            "--action-benchmark",
            metavar="FOLDER",
            help="also write smaller-is-better.json and bigger-is-better.json for github-action-benchmark",
        ),
    ] = None,
    bencher: Annotated[Path | None, typer.Option("--bencher", metavar="FILE", help="also write Bencher's JSON")] = None,
    across: Across = None,
    unproven: Unproven = False,
    output: Output = Format.text,
) -> int:
    """Fail if results are worse than a baseline by more than the limit and more than noise.

    The baseline needs the same task, goal, data, parameters, machine and workers; of your own command, another version
    of its files is compared. The 95 % interval of the ratio decides, as in mlbench compare: of at least 3 runs on each
    side, or of 1 or 2 results against at least 5 earlier ones. On GitHub, the verdict is also an annotation and a step
    summary.

    Exit code 0: passed; 7: failed; 9: cannot tell, also as long as there is no baseline.
    """
    wanted = [gates.Wanted.parse(text) for text in checks or ["seconds"]]
    accepted = check_words(across or ())
    client = api.Client(notice=console.warn)
    with ExitStack() as stack:

        def open_all(paths: Sequence[Path]) -> list[Archive]:
            return open_archives(paths, stack, unproven=unproven)

        new = open_all(client.find_archives(results))
        try:
            earlier = _find_baseline(client, baseline, results[0])
        except CannotTellError as error:
            if not allows_undecided:
                raise
            console.warn(f"{error.message} {error.hint}")
            return 0
        old = open_all(earlier)
        found = gates.check_results(new, old, wanted, accepted, direction)
    verdict = gates.overall(found)
    if junit is not None:
        _write(junit, gate_files.format_junit(found))
    if benchmark is not None:
        for name, higher in (("smaller-is-better.json", False), ("bigger-is-better.json", True)):
            _write(benchmark / name, gate_files.format_action_benchmark(found, higher_is_better=higher).encode())
    if bencher is not None:
        _write(bencher, gate_files.format_bencher(found).encode())
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with naming_file_on_os_error(Path(summary), "written"), open(summary, "a", encoding="utf-8") as file:
            file.write(f"## mlbench gate: {verdict.phrase}\n\n{gate_files.format_summary(found)}")
    if output is Format.json:
        console.out_json({"verdict": str(verdict), "checks": [check.to_dict() for check in found]})
    else:
        rows = [[check.name, check.decision.verdict.phrase, check.decision.reason] for check in found]
        console.out_table(["CHECK", "VERDICT", "REASON"], rows, wrap=True)
        if console.is_on_github():
            console.out_command(gate_files.format_annotation(verdict, found))
    return _exit_code(verdict, allows_undecided)


def _find_baseline(client: api.Client, baseline: str, result: str) -> list[Path]:
    """The archives of the baseline. Raises CannotTellError that says how to begin one."""
    try:
        return find_archives_below(Path(baseline)) if Path(baseline).is_dir() else client.find_archives([baseline])
    except NotFoundError as error:
        raise CannotTellError(
            f"There is no baseline yet: {error.message[0].lower()}{error.message[1:]}",
            hint=f"To begin one with these results: {shlex.join(['mlbench', 'download', result, '--to', baseline])}",
        ) from None


def _exit_code(verdict: Verdict, allows_undecided: bool) -> int:
    if verdict is not Verdict.CANNOT_TELL:
        return verdict.exit_code
    console.warn("Some checks are undecided; more repeats or a longer history may decide them.")
    return 0 if allows_undecided else verdict.exit_code


def _write(path: Path, data: bytes) -> None:
    with naming_file_on_os_error(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
