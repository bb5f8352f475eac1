"""Mutation check: `python -m tools.mutate`, or `make mutate`. Do the unit tests notice when a decision is changed?

Each mutant is one small change to a module whose mistakes nobody would see: an operator, a bound, a constant, a
condition, a statement that is left out. Its tests run in a process of their own until the first failure. A mutant is
killed if a test fails or the tests take ten times as long as without it. Texts for people are not mutated.

Survivors that cannot be killed are explained in docs/explanation/mutation.md, which lists each one by its line. The
exit code is 1 if another one survives, or if an explanation is left over.
"""

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
EXPLANATIONS = ROOT / "docs" / "explanation" / "mutation.md"
# Module to the tests that are about it.
TARGETS: dict[str, tuple[str, ...]] = {
    "mlbench_cli.results.archive.judge": ("results/archive/test_judge.py", "results/archive/test_after_time.py"),
    "mlbench_cli.results.analysis.statistics": ("results/analysis/test_statistics.py",),
    "mlbench_cli.model.spec": ("model/test_spec.py",),
    "mlbench_cli.results.archive.canonical_zip": ("results/archive/test_canonical_zip.py",),
    "mlbench_cli.results.analysis.baseline": ("results/analysis/test_baseline.py", "results/analysis/test_gate.py"),
    "mlbench_cli.engines.kubernetes.diagnosis.scheduling": ("engines/kubernetes/test_diagnose.py",),
    "mlbench_cli.engines.kubernetes.logs": ("../contract/engines/kubernetes/test_logs.py",),
    "mlbench_cli.engines.machines.observe": ("engines/machines/test_observe.py",),
    "mlbench_cli.engines.machines.placement": ("engines/machines/test_placement.py",),
    "mlbench_cli.server.security": ("../contract/server/test_security.py",),
    "providers.aks.errors": ("providers/test_aks_errors.py",),
}
OWN_PACKAGES = ("mlbench_cli", "providers", "templates", "task_images", "tests")
MOST_FILES = 4  # test files of a module of the whole product: those that name it most often
BASELINE_SECONDS = 150.0  # CPU time of them without a mutant; a module whose tests take longer is left out
MINUTES = 60  # for a sample of the whole product
SLOWER, MIN_SECONDS = 10, 30.0  # a mutant is stopped after so many times the quiet duration, and not before so long

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the number of its node in the walk of the module's tree, which of the node's changes, and where."""

    module: str
    node: int
    variant: int
    line: int
    source: str
    change: str

    def __str__(self) -> str:
        return f"`{self.source}` → {self.change}"


def list_mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    lines = source.splitlines()
    found = []
    for number, node in enumerate(walk(ast.parse(source))):
        for variant, (change, _) in enumerate(changes(node)):
            line = getattr(node, "lineno", 0)
            found.append(Mutant(module, number, variant, line, lines[line - 1].strip(), change))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.node, mutant.variant))


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, decorators, imports, assertions, docstrings or parts of texts."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST) and not _is_skipped(item):
                yield from walk(item)


def _is_skipped(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr | ast.alias)


def changes(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """Each change of one node: what it does, and the node as it is then."""
    if isinstance(node, ast.Compare):
        return [
            (f"{_name(old)} → {_name(new())}", _with(node, ops=[*node.ops[:at], new(), *node.ops[at + 1 :]]))
            for at, old in enumerate(node.ops)
            if (new := COMPARISONS.get(type(old)))
        ]
    if isinstance(node, ast.BinOp | ast.AugAssign):
        other = OPERATORS.get(type(node.op))
        return [(f"{_name(node.op)} → {_name(other())}", _with(node, op=other()))] if other else []
    if isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return [(f"{_name(node.op)} → {_name(swapped)}", _with(node, op=swapped))]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return [(f"without {'not' if isinstance(node.op, ast.Not) else '-'}", node.operand)]
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        return [("condition negated", _with(node, test=ast.UnaryOp(ast.Not(), node.test)))]
    if isinstance(node, ast.Continue | ast.Break):
        other_jump = ast.Break() if isinstance(node, ast.Continue) else ast.Continue()
        return [(f"{_name(node)} → {_name(other_jump)}", other_jump)]
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return [("left out", ast.Pass())]
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        return [("returns None", ast.Return(ast.Constant(None)))]
    if isinstance(node, ast.Constant):
        return [(f"{node.value!r} → {new!r}", ast.Constant(new)) for new in _constants(node.value)]
    return []


def _constants(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return [f"{value}_"] if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_<]+", value) else []


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _name(node: ast.AST) -> str:
    return type(node).__name__


def mutate(source: str, mutant: Mutant) -> ast.Module:
    """The module's tree with the change made."""
    tree = ast.parse(source)
    target = next(node for number, node in enumerate(walk(tree)) if number == mutant.node)
    _, new = changes(target)[mutant.variant]
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(item is target for item in value):
                setattr(parent, name, [new if item is target else item for item in value])
    return ast.fix_missing_locations(tree)


class _MutantFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a tree instead of its file."""

    def __init__(self, name: str, tree: ast.Module, path: Path) -> None:
        self._name, self._tree, self._path = name, tree, path

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


def list_product() -> list[str]:
    """All modules of the product, by name."""
    packages = ("mlbench_cli", "providers", "templates", "task_images")
    paths = [path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py")]
    return sorted(path.with_suffix("").as_posix().replace("/", ".") for path in paths if path.stem != "__init__")


def find_tests(module: str) -> list[str]:
    """Tests of a module: the unit tests that import it, else the contract tests that do, else the unit tests of its
    package. At most MOST_FILES, those first that use most of its names, and of these the shortest."""
    package, _, name = module.rpartition(".")
    spellings = (f"from {module} import", f"import {module}\n", f"from {package} import {name}\n")
    for folder in ("unit", "contract"):
        texts = {path: path.read_text("utf-8") for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))}
        found = [path for path, text in texts.items() if any(spelling in text for spelling in spellings)]
        if found:
            public = set(re.findall(r"^(?:class|def) ([A-Za-z]\w*)", _source(module), re.MULTILINE))
            uses = {path: len(public & set(re.findall(r"\w+", texts[path]))) for path in found}
            found.sort(key=lambda path: (path.stem != f"test_{name}", -uses[path], len(texts[path])))
            return [path.relative_to(ROOT).as_posix() for path in found[:MOST_FILES]]
    parts = package.removeprefix("mlbench_cli").strip(".").split(".")
    place = ROOT.joinpath("tests", "unit", *parts)
    return [place.relative_to(ROOT).as_posix()] if any(place.glob("test_*.py")) else []


def _source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text("utf-8")


def check_product(count: int, seed: int, minutes: float) -> int:
    """Mutants at random places of the product, each with the tests that are about its module, for so many minutes.
    Prints how many were killed, and how many were not tried and why."""
    end = time.monotonic() + 60 * minutes
    everything = [mutant for module in list_product() for mutant in list_mutants(module, _source(module))]
    chosen = random.Random(seed).sample(everything, min(count, len(everything)))
    by_module: dict[str, list[Mutant]] = {}
    for mutant in chosen:
        by_module.setdefault(mutant.module, []).append(mutant)
    tests = {module: find_tests(module) for module in sorted(by_module)}
    load_third_parties(sorted({name for names in tests.values() for name in names}))
    survived, left_out = 0, 0
    # In a random order: what the time does not suffice for is a random part, too.
    for module in random.Random(seed).sample(list(tests), len(tests)):
        mutants = by_module[module]
        if time.monotonic() >= end:
            left_out += len(mutants)
        elif not tests[module]:
            survived += len(mutants)
            for mutant in mutants:
                print(f"  survived, line {mutant.line}: {mutant}   (no test imports {module})", flush=True)
        else:
            try:
                survived += len(check_module(module, tests[module], None, seed, None, mutants)[1])
            except CannotCheck as reason:
                left_out += len(mutants)
                print(f"  left out: {reason}", flush=True)
    tried = len(chosen) - left_out
    killed = tried - survived
    share = f", {killed / tried:.1%}" if tried else ""
    print(f"{killed} of {tried} mutants killed{share}; {left_out} of {len(chosen)} were not tried (no time, or")
    print(f"tests that fail or take too long); the product has {len(everything)}")
    return 0


class CannotCheck(Exception):
    """The tests of a module fail without a mutant, or take too long."""


def run_tests(tests: Sequence[str], finder: _MutantFinder | None, seconds: float) -> int | None:
    """Run tests in a child process: pytest's exit code, or None if they took more than `seconds`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            # Not only wall-clock time: the machine may be busy, and a mutant may loop for ever.
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            signal.alarm(int(5 * seconds) + 1)
            quiet = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(quiet, descriptor)
            if finder is not None:
                sys.meta_path.insert(0, finder)
            code = _pytest(["-x", *tests])
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None


def _pytest(arguments: Sequence[str]) -> int:
    import pytest

    return int(
        pytest.main(
            [
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "--no-header",
                "-m",
                "not nightly and not cluster",
                *arguments,
            ]
        )
    )


def check_module(
    module: str,
    tests: Sequence[str],
    sample: int | None,
    seed: int,
    again: str | None,
    only: Sequence[Mutant] | None = None,
) -> tuple[int, list[Mutant]]:
    """Run a module's mutants, `sample` of them, those named in `again` or `only` these: their number, the survivors."""
    path = ROOT / (module.replace(".", "/") + ".py")
    source = path.read_text("utf-8")
    mutants = list_mutants(module, source)
    total = len(mutants)
    if only is not None:
        mutants = list(only)
    if again is not None:
        mutants = [mutant for mutant in mutants if f": {mutant}\n" in again]
    if sample is not None and sample < total:
        chosen = random.Random(seed).sample(mutants, sample)
        mutants = sorted(chosen, key=lambda mutant: (mutant.line, mutant.node, mutant.variant))
    begin = time.monotonic()
    if run_tests(tests, None, 600 if only is None else BASELINE_SECONDS) != 0:
        raise CannotCheck(f"the tests of {module} fail without a mutant, or take too long: {' '.join(tests)}")
    limit = max(MIN_SECONDS, SLOWER * (time.monotonic() - begin))
    survivors = []
    for number, mutant in enumerate(mutants, 1):
        finder = _MutantFinder(module, mutate(source, mutant), path)
        if run_tests(tests, finder, limit) == 0:
            survivors.append(mutant)
            print(f"  survived, line {mutant.line}: {mutant}", flush=True)
        elif sys.stderr.isatty():
            print(f"\r  {number} of {len(mutants)}", end="", file=sys.stderr, flush=True)
    killed = len(mutants) - len(survivors)
    if again is not None:
        print(f"{module}: {killed} killed of {len(mutants)} earlier survivors, {total} mutants in all", flush=True)
        return total, survivors
    which = f"{len(mutants)} of {total}" if len(mutants) < total else f"all {total}"
    print(f"{module}: {killed} killed of {which} mutants, {killed / len(mutants):.1%}", flush=True)
    return len(mutants), survivors


def load_third_parties(tests: Sequence[str]) -> None:
    """Import once what all children need, and then forget the project's own modules, one of which is mutated."""
    quiet, saved = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(quiet, 1)
    _pytest(["--collect-only", *tests])
    os.dup2(saved, 1)
    for name in [name for name in sys.modules if name.split(".")[0] in OWN_PACKAGES]:
        del sys.modules[name]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TARGETS), help="modules; default: all that are listed")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of each module, chosen by --seed")
    parser.add_argument("--product", type=int, metavar="N", help="N mutants at random places of the whole product")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="most time for --product (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, metavar="FILE", help="only the survivors that an earlier run has printed")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    if options.product is not None:
        return check_product(options.product, options.seed, options.minutes)
    files = {module: [f"tests/unit/{name}" for name in TARGETS[module]] for module in options.modules}
    load_third_parties([name for names in files.values() for name in names])
    explained = EXPLANATIONS.read_text("utf-8")
    again = None if options.again is None else options.again.read_text("utf-8")
    count, unexplained = 0, []
    for module, tests in files.items():
        try:
            number, survivors = check_module(module, tests, options.sample, options.seed, again)
        except CannotCheck as reason:
            raise SystemExit(str(reason)) from None
        count += number
        unexplained += [mutant for mutant in survivors if str(mutant) not in explained]
    print(f"{len(unexplained)} survivors of {count} mutants are not explained in {EXPLANATIONS.relative_to(ROOT)}")
    for mutant in unexplained:
        print(f"  {mutant.module}:{mutant.line}: {mutant}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
