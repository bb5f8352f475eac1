"""The code that is sent to machines: agents run it with the Python that is there, from 3.9 on."""

import ast
import io
import tarfile
from collections.abc import Iterator

import pytest

from mlbench_cli.engines.code import pack_task_code

OLDEST = (3, 9)
# Of the standard library since Python 3.10, as far as this code might want it.
NEWER = {
    "enum": {"StrEnum"},
    "typing": {
        *("NotRequired", "Required", "Self", "Never", "assert_never", "Unpack", "LiteralString", "override"),
        *("ParamSpec", "Concatenate", "TypeAlias", "TypeGuard"),
    },
    "types": {"NoneType", "UnionType"},
    "datetime": {"UTC"},
    "itertools": {"pairwise", "batched"},
    "contextlib": {"chdir", "aclosing"},
    "hashlib": {"file_digest"},
    "math": {"cbrt", "exp2", "sumprod"},
    "sys": {"orig_argv", "stdlib_module_names", "exception"},
    "tomllib": {"load", "loads"},
    "builtins": {"ExceptionGroup", "BaseExceptionGroup", "aiter", "anext"},
}
METHODS = {"bit_count", "add_note"}
ARGUMENTS = {
    "zip": {"strict"},
    "dataclass": {"slots", "kw_only"},
    "field": {"kw_only"},
    "bisect_left": {"key"},
    "bisect_right": {"key"},
    "insort": {"key"},
    "create_connection": {"all_errors"},
    "is_file": {"follow_symlinks"},
    "is_dir": {"follow_symlinks"},
    "exists": {"follow_symlinks"},
}
CLIENT = "mlbench_cli/agent/channel.py"  # lies beside them and runs where `mlbench` does
TYPES = ("None", "int", "str", "float", "bool", "bytes", "dict", "list", "tuple", "set")


def read_sources() -> dict[str, str]:
    """What every agent gets, by name."""
    with tarfile.open(fileobj=io.BytesIO(pack_task_code(None))) as archive:
        opened = [(each.name, archive.extractfile(each)) for each in archive if each.name.endswith(".py")]
        return {name: file.read().decode() for name, file in opened if file is not None}


SOURCES = read_sources()


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - {CLIENT}))
def test_agents_of_python_3_9_can_run_the_code_that_is_sent_to_them(name: str) -> None:
    assert list(find_newer(SOURCES[name])) == []


def find_newer(source: str) -> Iterator[str]:
    """What Python 3.9 cannot do, each with its line."""
    try:
        tree = ast.parse(source, feature_version=OLDEST)
    except SyntaxError as error:
        yield str(error)
        return
    is_lazy = "from __future__ import annotations" in source
    for node in ast.walk(_Executed(is_lazy).visit(tree)):
        yield from (f"line {getattr(node, 'lineno', '?')}: {words}" for words in _list_newer(node))


class _Executed(ast.NodeTransformer):
    """Leaves out what runs nowhere, and what has an `except` for where it does not exist."""

    def __init__(self, is_lazy: bool) -> None:
        self._is_lazy = is_lazy

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]
        return self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        if any(each.type is not None and ast.unparse(each.type) == "ImportError" for each in node.handlers):
            node.body = [ast.Pass()]
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("annotation", "returns"):
            if self._is_lazy and getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        return super().generic_visit(node)


def _list_newer(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names if each.name == "tomllib")
    elif isinstance(node, ast.ImportFrom):
        yield from (each.name for each in node.names if each.name in NEWER.get(str(node.module), ()))
    elif isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        yield from [node.attr] if node.attr in METHODS or node.attr in NEWER.get(owner, ()) else []
    elif isinstance(node, ast.Name):
        yield from [node.id] if node.id in NEWER["builtins"] else []
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        yield from (f"{name}({each.arg}=)" for each in node.keywords if each.arg in ARGUMENTS.get(name, ()))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        ends = [ast.unparse(end).partition("[")[0] for end in (node.left, node.right)]
        yield from [ast.unparse(node)] if any(end in TYPES for end in ends) else []
