"""A report as one HTML file that needs no network: everything is inside, and a policy forbids all else."""

import base64
import hashlib
from collections.abc import Sequence

from mlbench_cli import __version__
from mlbench_cli.results.report.environment import make_environment, read_asset
from mlbench_cli.results.report.model import Report
from mlbench_cli.results.report.svg import render_svg


def render_html(report: Report) -> str:
    """The page. The same report gives the same bytes."""
    from markupsafe import Markup

    environment = make_environment()
    style = f"{read_asset('vendored/uPlot.min.css')}\n{read_asset('page.css')}"
    library, script = read_asset("vendored/uPlot.iife.min.js"), read_asset("figures.js")
    return environment.get_template("page.html.j2").render(
        report=report,
        svgs={figure.key: Markup(render_svg(figure)) for figure in report.figures},
        policy=_policy([style], [library, script]),
        style=Markup(style),
        library=Markup(library),
        script=Markup(script),
        licence=read_asset("vendored/LICENSE.uPlot"),
        version=__version__,
    )


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """The content security policy that allows exactly these texts. uPlot sets styles by script, which is allowed."""
    sources = {"style-src": styles, "script-src": scripts}
    words = [[name, *(f"'sha256-{_digest(text)}'" for text in texts)] for name, texts in sources.items()]
    allowed = "; ".join(" ".join(each) for each in words)
    return f"default-src 'none'; {allowed}; img-src data:; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
