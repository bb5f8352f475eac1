"""A report as one self-contained HTML file: the style is inlined, and a policy blocks everything else."""

import base64
import hashlib

from mlbench_cli import __version__
from mlbench_cli.results.figures.files import STYLE
from mlbench_cli.results.figures.svg import render_svg
from mlbench_cli.results.report.environment import make_environment, read_asset
from mlbench_cli.results.report.model import Report

_NO_FORMS = "base-uri 'none'; form-action 'none'"


def render_html(report: Report, data: str = "") -> str:
    """Render the page; equal reports give equal bytes. `data` is the folder of the CSV files, next to the page."""
    from markupsafe import Markup

    style = f"{STYLE.read_text('utf-8')}\n{read_asset('page.css')}"
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        make_environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            svgs={figure.key: Markup(render_svg(figure)) for figure in report.figures},
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; {_NO_FORMS}",
            style=Markup(style),
            version=__version__,
            data=data,
        )
    )
