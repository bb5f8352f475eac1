"""The look that all figures share, and how they are written. Drawn without pyplot, so nothing global is touched."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli import files
from mlbench_cli.errors import MlbenchError
from mlbench_cli.extras import install_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008), which differ for any colour vision; yellow is left out for its contrast on white.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
MARKERS = "osD^vPX"
# One hue for what belongs together: computation blue, communication vermilion, data green, checking purple.
PHASES = {
    "forward": "#9ecae1",
    "loss": "#deebf7",
    "backward": "#4292c6",
    "optimizer": "#08519c",
    "communication": "#D55E00",
    "preprocessing": "#a1d99b",
    "data_wait": "#238b45",
    "metrics": "#cbc9e2",
    "validation": "#8c6bb1",
    "other": "#bdbdbd",
}
_STYLE: dict[str, object] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
    "font.size": 9.5,
    "grid.color": "#dddddd",
    "hatch.color": "#555555",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "mlbench",
    "text.parse_math": False,
}


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, for as long as they are drawn and written. Raises MlbenchError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise MlbenchError("Charts need matplotlib, which is not installed.", hint=install_hint("plots")) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type,unused-ignore]
        yield


def write(figure: "Figure", stem: Path) -> list[Path]:
    """The figure as STEM.png and STEM.svg, without dates; the paths."""
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        with files.replace_file(stem.with_suffix(suffix)) as file:
            figure.savefig(file, format=suffix[1:], metadata=metadata)
    return [stem.with_suffix(".png"), stem.with_suffix(".svg")]
