"""Who may import whom: layers from the bottom to the top, no circle, and no torch in the tool."""

import ast
import functools
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A package imports itself and what stands above it in this list; those of one line do not import each other.
LAYERS = """
isolation errors
util
console config
task_images
model
kube templates agent
storage
providers tasks
certify
archive results.archive
clusters engines analysis results.analysis
results.figures
results.report pages
results runs
certify.certificate
predict
api
results.site results.exports
server
commands
boundary
app
__main__
"""
RANKS = {name: rank for rank, names in enumerate(LAYERS.split("\n")) for name in names.split()}


@functools.cache
def imports() -> dict[str, set[str]]:
    """What each module imports, also inside functions and for type checkers: a circle is hidden there, not opened."""
    paths = [
        path for top in ("mlbench_cli", "providers", "templates", "task_images") for path in ROOT.glob(f"{top}/**/*.py")
    ]
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name: set(_imports(ROOT / (name.replace(".", "/") + ".py"), known)) for name in known}


def _imports(path: Path, known: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            inside = [
                one
                for one in (name, f"{name}.__init__", name.rpartition(".")[0], f"{name.rpartition('.')[0]}.__init__")
                if one in known
            ]
            yield inside[0] if inside else name


def layer(name: str) -> str:
    """The package of LAYERS that a module belongs to."""
    parts = name.removeprefix("mlbench_cli.").split(".")
    found = next((one for one in (".".join(parts[:2]), parts[0]) if one in RANKS), None)
    assert found, f"{name}: its package has no layer in {__file__}"
    return found


def test_imports_go_down() -> None:
    ours = imports().keys() - {"mlbench_cli.__init__"}
    up = [
        f"{name} imports {other}"
        for name in ours
        for other in imports()[name] & ours
        if layer(name) != layer(other) and RANKS[layer(name)] <= RANKS[layer(other)]
    ]
    assert not up, "\n".join(sorted(up))


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {name: (found & imports().keys()) - {name} for name, found in imports().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, whose message has the circle


def test_the_tool_never_imports_torch_and_tasks_never_import_the_tool() -> None:
    for name, found in imports().items():
        tops = {one.partition(".")[0] for one in found}
        forbidden = (
            {"mlbench_cli", "providers", "templates"} if name.startswith("task_images.") else {"torch", "torchvision"}
        )
        assert not tops & forbidden, f"{name} imports {tops & forbidden}"


HEAVY = {"torch", "numpy", "matplotlib", "kubernetes", "boto3", "botocore", "google", "azure", "requests", "jinja2"}
LIST = "import sys; from mlbench_cli.__main__ import main; assert main() == 0; print(*sys.modules, file=sys.stderr)"


@pytest.mark.parametrize(
    "command", ["--version", "--help", "status", "list-clusters", "run x 1 --command true --dry-run"]
)
def test_what_a_person_waits_for_loads_no_large_library(command: str, tmp_path: Path) -> None:
    environment = {"MLBENCH_HOME": str(tmp_path), "PATH": os.defpath}
    words = [sys.executable, "-c", LIST, *command.split()]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "mlbench_cli" in loaded
    assert not loaded & HEAVY
