"""`mlbench site`: results that others can read, check and repeat, as static pages."""

from pathlib import Path
from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output
from mlbench_cli.results.site.build import SiteOptions, build_site
from mlbench_cli.util.text import counted, list_some, one_line, shorten


def site(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="folders with archives and receipts")],
    target: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="folder of the site")] = Path("site"),
    title: Annotated[str, typer.Option("--title", help="title of the site")] = "mlbench results",
    address: Annotated[
        str, typer.Option("--address", metavar="URL", help="where the site will be, for the commands it shows")
    ] = "",
    signers: Annotated[
        Path | None, typer.Option("--signers", metavar="FILE", help="file of allowed signers, as git's")
    ] = None,
    worker_hour: Annotated[
        float | None,
        typer.Option(
            "--worker-hour", min=0, metavar="USD", help="price per worker and hour of runs without a known price"
        ),
    ] = None,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="leave out archives that do not verify, and list them")
    ] = False,
    output: Output = Format.text,
) -> None:
    """Build a static results site from verified archives.

    It has a page per task and per result, filters, time against cost, index.json and results.csv, and works without
    JavaScript. The exit code is 7 if an archive does not verify. Serve it over http, e.g. with python -m http.server.
    """
    options = SiteOptions(title, address, signers, worker_hour, leave_out)
    summary = build_site(folders, target, options, notice=console.note)
    for refused in summary.refused:
        console.warn(f"left out: {refused.source}: {refused.message}")
    disclosed = {kind: len(values) for kind, values in summary.disclosed.items()}
    if output is Format.json:
        console.out_json(
            {
                "site": str(target.absolute()),
                "results": summary.claims,
                "archives": summary.archives,
                "receipts": summary.receipts,
                "bytes_of_archives": summary.bytes,
                "largest_page_bytes": summary.largest_page,
                "refused": [each._asdict() for each in summary.refused],
                "disclosed": disclosed,
            }
        )
        return
    console.out(str(target / "index.html"))
    receipts = counted(summary.receipts, "receipt")
    console.note(
        f"{counted(summary.claims, 'result')} from {counted(summary.archives, 'archive')} "
        f"({console.size(summary.bytes)}), {receipts}; largest page {console.size(summary.largest_page)}"
    )
    if summary.disclosed:
        console.note("The archives publish the following (mlbench run --anonymous omits it):")
        for kind, values in summary.disclosed.items():
            console.note(f"  {kind}: {one_line(list_some([shorten(value, 200) for value in sorted(values)], 8))}")
    console.note(f"Next: python -m http.server --directory {target}")
