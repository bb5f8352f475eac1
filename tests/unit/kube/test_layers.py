"""The modules that reach a cluster import each other downwards only, and none of them costs much before it is used."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import mlbench_cli.kube

FOLDER = Path(mlbench_cli.kube.__file__).parent
PREFIX = "mlbench_cli.kube."


def own_imports(node: ast.AST) -> set[str]:
    found = (child for child in ast.walk(node) if isinstance(child, ast.ImportFrom))
    return {str(child.module) for child in found if str(child.module).startswith("mlbench_cli.")}


def test_no_own_module_is_imported_inside_a_function() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert not own_imports(node), f"{path.name}: {node.name} hides an import"


def test_the_modules_form_no_circle() -> None:
    graph = {path.stem: own_imports(ast.parse(path.read_text())) for path in FOLDER.glob("*.py")}
    inside = {
        name: {target.removeprefix(PREFIX) for target in targets if target.startswith(PREFIX)}
        for name, targets in graph.items()
    }
    order = list(graphlib.TopologicalSorter(inside).static_order())
    assert order.index("api") < order.index("access")
    assert order.index("kubeconfig") < order.index("access")


def test_nothing_heavy_is_loaded_before_a_cluster_is_asked() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    program = "import sys\n" + "".join(f"import {PREFIX}{name}\n" for name in names) + "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"kubernetes", "urllib3", "websocket", "requests", "pydantic", "yaml"}


def test_without_the_library_the_next_command_is_named(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['kubernetes'] = None\n"
        "from mlbench_cli.errors import UsageError\nfrom mlbench_cli.kube.access import Access\n"
        "try:\n    Access('https://c.invalid').client()\n"
        "except UsageError as error:\n    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[k8s]" in done.stdout
