"""How tables of the API look in a notebook: HTML without scripts, every text escaped."""

from collections.abc import Iterable, Sequence
from html import escape

from mlbench_cli.results.analysis.numbers import NO_VALUE, format_value

MAX_ROWS = 20


def display_table(head: Sequence[str], rows: Iterable[Sequence[object]], total: int | None = None) -> str:
    """A table of the first MAX_ROWS rows; `total` says how many there are if `rows` are not all."""
    shown: list[Sequence[object]] = []
    count = 0
    for row in rows:
        count += 1
        if count <= MAX_ROWS:
            shown.append(row)
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in shown)
    left = max(0, (total or count) - len(shown))
    more = f"<p>{left} more rows</p>" if left else ""
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: object) -> str:
    if value is None:
        return NO_VALUE
    return format_value(value) if isinstance(value, float) else escape(str(value))
