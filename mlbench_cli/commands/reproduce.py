"""`mlbench reproduce`: run a result again, and say whether it is the same."""

import difflib
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import api, console
from mlbench_cli.api import Launch
from mlbench_cli.api.remote_archives import is_url
from mlbench_cli.api.repetition import AuthorsProgram, refuse_to_reproduce
from mlbench_cli.commands._archives import open_archives
from mlbench_cli.commands._common import Format, Output, Yes, complete_clusters
from mlbench_cli.commands._images import require_images
from mlbench_cli.commands._members import follow_all
from mlbench_cli.commands._new_cluster import describe_cluster, make_cluster
from mlbench_cli.commands._report import in_words
from mlbench_cli.commands._selection import complete_names
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import RunSpec, common_name
from mlbench_cli.results import receipts
from mlbench_cli.results.analysis import reproduction
from mlbench_cli.results.analysis.numbers import format_estimate
from mlbench_cli.results.analysis.reproduction import Reproduction, format_margin
from mlbench_cli.results.analysis.stats import MAX_REPEATS
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.files import read_end
from mlbench_cli.util.text import counted

AUTO = "auto"
MAX_CODE_LINES = 400  # of a stranger's script that are shown


def reproduce(
    context: typer.Context,
    original: Annotated[
        list[str],
        typer.Argument(
            metavar="ARCHIVE...",
            help="result to reproduce: one or more repeats of a run, as folders, zips, URLs or names",
            autocompletion=complete_names,
        ),
    ],
    within: Annotated[
        str, typer.Option("--within", metavar="SHARE", help="margin within which figures count as the same, e.g. 5%")
    ] = "10%",
    repeat: Annotated[
        str, typer.Option("--repeat", metavar="N", help="number of runs; auto: as many as the original's spread needs")
    ] = AUTO,
    name: Annotated[str | None, typer.Option("--name", help="name of the new runs; default: ORIGINAL-repro")] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="cluster to run on; default: this machine", autocompletion=complete_clusters),
    ] = None,
    create: Annotated[
        bool,
        typer.Option(
            "--create", help="create a cluster like the original's after showing its price, and delete it afterwards"
        ),
    ] = False,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="folder with the data sets there")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="RESULT",
            help="judge these finished runs or archives instead of running anything; repeatable",
            autocompletion=complete_names,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="figure that must agree; repeatable; default: time to the goal"),
    ] = None,
    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="where to write the receipt; default: NAME.json")
    ] = None,
    run_foreign_command: Annotated[
        bool,
        typer.Option(
            "--run-foreign-command", help="run a command that the archive's author chose, and its script, unasked"
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be run, then exit")] = False,
    yes: Yes = False,
    output: Output = Format.text,
) -> int:
    """Run a result again and test whether it is the same within a margin.

    mlbench verifies the archives, makes the same request again on this machine or on a cluster, and tests every figure
    for equivalence: its 95 % interval has to lie within the margin. A command that an archive's author chose is shown
    with its script, and runs only if you agree to that (--yes does not). The answer is written as a receipt that names
    all archives by digest; mlbench verify checks it and, with --sign KEY, signs it.

    Exit code 0: reproduced; 7: different; 9: cannot tell.
    """
    margin, client = _parse_margin(within), api.Client(notice=console.note)
    if create and cluster:
        raise UsageError("--create makes a cluster, and --cluster names one.", hint="Leave one of them out.")
    if against and (repeat != AUTO or cluster or create or data_dir or name or dry_run):
        raise UsageError(
            "--with judges existing runs and cannot be combined with options about new runs.", hint="Leave them out."
        )
    with ExitStack() as stack:
        words = [str(client.fetch_archive(word)) if is_url(word) else word for word in original]
        first = reproduction.check_original(open_archives(client.find_archives(words), stack))
        figures = reproduction.choose_figures(first, metric or ())
        if against:
            title = f"{_title(first)}-repro"
            own = open_archives(client.find_archives(against), stack)
        else:
            count = _choose_count(repeat, first, figures, margin)
            if create:
                made = make_cluster(client.store, *describe_cluster(first, count), yes=yes, dry_run=dry_run)
                cluster = stack.enter_context(made).name
                if dry_run:
                    if output is Format.json:
                        facts = {"cluster": cluster, "repeats": count, "figures": list(figures), "margin": margin}
                        console.out_json(facts)
                    console.note(f"Nothing was created. {counted(count, 'run')} would start on {cluster}.")
                    return 0
            agree = partial(_agree, is_trusted=run_foreign_command, is_dry=dry_run)
            launch = client.prepare_reproduction(
                first, name=name, repeats=count, cluster=cluster, data_dir=data_dir, agree=agree
            )
            title = launch.experiment.name
            _announce(launch.specs, first, margin, figures)
            launch.render(offline=dry_run)
            if dry_run:
                _print_plan(launch.specs, figures, margin, output)
                return 0
            own = open_archives(_run(launch, context.obj, client), stack)
        found = reproduction.judge_reproduction(first, own, margin, figures)
        document = receipts.make_receipt(first, own, found)
    path = receipt or Path(f"{title}.json")
    receipts.write_receipt(path, document)
    if output is Format.json:
        console.out_json({"receipt": str(path), **document})
    else:
        _show(found)
    console.note(f"Receipt: {path}")
    console.next_step(shlex.join(["mlbench", "verify", str(path), *original, *(against or [title])]))
    return found.verdict.exit_code


def _agree(program: AuthorsProgram, *, is_trusted: bool, is_dry: bool) -> None:
    """Show what the archive's author chose, and ask. Raises UsageError if it is more than a command with its files."""
    if not program.is_shown_whole or not (program.code or is_trusted):
        refuse_to_reproduce(program)
    console.note(str(program))
    shown = 0
    for name, data in sorted(program.code.items()):
        lines = _describe_file(name, data)
        more = len(lines) - max(1, MAX_CODE_LINES - shown)
        console.note("\n".join(lines[:-more] if more > 0 else lines))
        if more > 0:
            console.note(f"  {counted(more, 'more line')} of {name}; all of it is in the archive, below code/")
        shown += len(lines)
    if not (is_trusted or is_dry):
        console.confirm("Run this?", yes=False, flag="--run-foreign-command")


def _describe_file(name: str, data: bytes) -> list[str]:
    """A file of a stranger's command: what differs from the file of that name here, else its text."""
    theirs = data.decode("utf-8", "replace").splitlines()
    here = read_end(Path(name), len(data) + 1) if Path(name).is_file() else None
    if here == data:
        return [f"  {name}: the same as here"]
    if here is None:
        return [f"  {name}:", *(f"    {line}" for line in theirs)]
    ours = here.decode("utf-8", "replace").splitlines()
    differences = difflib.unified_diff(ours, theirs, f"{name} here", f"{name} in the archive", lineterm="")
    return [f"  {name} differs:", *(f"    {line}" for line in differences)]


def _parse_margin(text: str) -> float:
    """0.05 of "5%" or "0.05". Raises UsageError."""
    try:
        share = float(text.removeprefix("+").removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    share = 0.0 if "_" in text else share  # Python's digit separator
    if not 0 < share < 1:
        raise UsageError(f'--within "{text[:60]}" is not between 0 and 100 %.', hint="For example 5%, or 0.05.")
    return share


def _choose_count(text: str, original: Sequence[Archive], figures: Sequence[str], margin: float) -> int:
    """The number of runs that --repeat asks for. Raises UsageError."""
    if text != AUTO:
        if not text.isdecimal() or not text.isascii() or not 2 <= int(text[:4]) <= MAX_REPEATS:
            raise UsageError(f'--repeat "{text[:20]}" is neither auto nor a number from 2 to {MAX_REPEATS}.')
        return int(text)
    chosen = reproduction.choose_repeats(original, figures, margin)
    if chosen.margin is not None and chosen.margin > margin:
        reach = f"; {format_margin(chosen.margin)} is probably feasible (--within)" if chosen.margin < 1 else ""
        console.warn(
            f"The {len(original)} runs of the original differ too much from each other: no number of repeats is sure "
            f"to decide within {format_margin(margin)}{reach}."
        )
    return chosen.number


def _announce(specs: Sequence[RunSpec], original: Sequence[Archive], margin: float, figures: Sequence[str]) -> None:
    first = specs[0]
    seconds = max(float(archive.result["wall_seconds"] or 0.0) for archive in original)
    console.note(
        f"Original: {_title(original)}, {counted(len(original), 'run')} ({in_words(first)}). Again: "
        f"{counted(len(specs), 'run')} of about {console.rough_duration(seconds)} each.\n"
        f"It is reproduced if the two sides agree within {format_margin(margin)} in: {', '.join(figures)}."
    )


def _print_plan(specs: Sequence[RunSpec], figures: Sequence[str], margin: float, output: Format) -> None:
    if output is Format.json:
        runs = [{"name": spec.name, "seed": spec.seed, "cluster": spec.cluster} for spec in specs]
        console.out_json({"runs": runs, "figures": list(figures), "margin": margin})
        return
    rows = [[spec.name, spec.task, spec.workers, spec.cluster, spec.seed] for spec in specs]
    console.out_table(["RUN", "TASK", "WORKERS", "CLUSTER", "SEED"], rows)


def _run(launch: Launch, command_line: Sequence[str], client: api.Client) -> list[Path]:
    """Run the remaining new runs. Returns the folders of all of them."""
    if any(spec.engine == "kubernetes" for spec in launch.specs):
        require_images(launch.specs, client.cluster)
    with launch.open(("mlbench", *command_line)) as opened:
        if launch.is_known:
            console.note(f'Resuming "{opened.name}": {len(opened.left)} of {len(opened.runs)} runs to do.')
        opened.record()
        follow_all(opened)
        return [run.folder for run in opened.runs]


def _title(original: Sequence[Archive]) -> str:
    """ "demo-2" of the repeats demo-2-r1 and demo-2-r2."""
    name = original[0].name
    return common_name(name) or name


# --- the answer -----------------------------------------------------------------------------------------------------


def _show(found: Reproduction) -> None:
    phrase = found.verdict.phrase
    console.out(f"{phrase[0].upper()}{phrase[1:]}. {found.reason}\n")
    rows = []
    for figure in found.figures:
        row = figure.row
        sides = [format_estimate(side, row.unit) if side else None for side in (row.a, row.b)]
        rows.append([row.name, *sides, row.words, figure.verdict.phrase])
    console.out_table(["FIGURE", "ORIGINAL", "AGAIN", "AGAINST THE ORIGINAL", "VERDICT"], rows, droppable=["VERDICT"])
    console.out("")
    console.out_table(
        ["NOT THE SAME", "ORIGINAL", "AGAIN"],
        [
            [f"{each.name.removeprefix('values of ')}{' *' if each.matters else ''}", each.original, each.reproduction]
            for each in found.not_the_same
        ],
        wrap=True,
    )
    if any(each.matters for each in found.not_the_same):
        console.note("*: may affect times, so a difference would not disprove the original.")
    console.note(f"Sessions: {found.sessions}.")
