"""The notebook in docs, cell by cell, with what each would show."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "figures.ipynb"


def execute(code: str, names: dict[str, object]) -> object:
    """Run a cell; the value of its last line, if that is an expression."""
    tree = ast.parse(code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.nightly
def test_every_cell_of_the_notebook_runs_and_shows_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    document = json.loads(NOTEBOOK.read_text("utf-8"))
    assert document["nbformat"] == 4
    names: dict[str, object] = {}
    shown = []
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # what is shown is made, never kept
            shown.append(str(execute("".join(cell["source"]), names)))
    runs, _, metrics, verdict, plot = shown
    assert "notebook-1" in runs
    assert "val_global_Prec@1" in metrics
    assert "notebook-2" in verdict
    assert "Axes" in plot
