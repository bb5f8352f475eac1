"""Mutation check: `python -m tools.mutate`, or `make mutate`. Do the tests notice when a decision is changed?

Each mutant is one small change to the product: an operator, a bound, a constant, a condition, a statement that is left
out. The tests that run the changed line try it in a process of their own, the quickest first. A mutant is killed if one
of them fails that passes without it, or if they take ten times as long; or if mypy, which `make test` runs, too, finds
an error that is not there without it. Texts for people are not mutated.

Which tests run which lines is recorded once in build/mutate, by as many workers as `make test` has, and again by
`--record`: for all tests, or for those that are named, in addition to what is known. Agents and ranks are programs that
are not recorded; all tests in the folders that start them try their lines. Slow tests are left out, so that the share
of killed mutants is, if anything, too low.

Without arguments all mutants of the modules in TARGETS are tried. Their survivors that cannot be killed are explained
in docs/explanation/mutation.md, which lists each one by its line. The exit code is 1 if another one survives.
"""

import argparse
import ast
import configparser
import contextlib
import copy
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[1]
EXPLANATIONS = ROOT / "docs" / "explanation" / "mutation.md"
MAP = ROOT / "build" / "mutate"
SECONDS = MAP / "seconds.json"
PRODUCT = ("mlbench_cli", "providers", "templates", "task_images")
MARKS = "not nightly and not cluster and not slow"
# The other tests only start whole programs, whose lines are not recorded.
RECORDED = (
    "tests/unit",
    *(f"tests/contract/{name}" for name in ("commands", "engines", "kube", "providers", "results", "runs")),
    *(f"tests/contract/{name}" for name in ("server", "simulator", "task_images", "test_api.py", "test_images.py")),
)
# Packages that run in programs, which are not recorded, and the tests that start these.
PROGRAMS = {
    "mlbench_cli.agent": ("tests/contract/engines/local", "tests/contract/engines"),
    "mlbench_cli.simulator": ("tests/contract/simulator",),
    "mlbench_cli.server": ("tests/contract/server",),
    "task_images": ("tests/contract/task_images",),
}
# Modules whose mistakes nobody would see.
TARGETS = (
    "mlbench_cli.results.archive.judge",
    "mlbench_cli.results.analysis.statistics",
    "mlbench_cli.model.spec",
    "mlbench_cli.results.archive.canonical_zip",
    "mlbench_cli.results.analysis.baseline",
    "mlbench_cli.engines.kubernetes.diagnosis.scheduling",
    "mlbench_cli.engines.kubernetes.logs",
    "mlbench_cli.engines.machines.observe",
    "mlbench_cli.engines.machines.placement",
    "mlbench_cli.server.security",
    "providers.aks.errors",
)
MOST_SECONDS = 60.0  # of tests for one mutant, as recorded on a busy machine: the quickest that run its line
SLOWER, MIN_SECONDS = 10, 30.0  # a mutant is stopped after so many times the usual duration, and not before so long

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


def path_of(module: str, root: Path = ROOT) -> Path:
    return root / (module.replace(".", "/") + ".py")


def list_product() -> list[str]:
    """All modules of the product, by name."""
    paths = [path.relative_to(ROOT) for package in PRODUCT for path in (ROOT / package).rglob("*.py")]
    return sorted(path.with_suffix("").as_posix().replace("/", ".") for path in paths if path.stem != "__init__")


def lines_of(source: str, mutant: Mutant) -> set[int]:
    """Lines of which one runs if the changed place does: its own, and the first of its statement."""
    tree = ast.parse(source)
    target = next(node for number, node in enumerate(walk(tree)) if number == mutant.node)
    found = {mutant.line}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            parts = (part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt))
            if statement is target or any(node is target for part in parts for node in ast.walk(part)):
                found.add(statement.lineno)
    return found


class Recorder:
    """A plugin of pytest: tells coverage which test runs, and keeps how long each has taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (current := coverage.Coverage.current()) is not None:
            current.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        if (current := coverage.Coverage.current()) is not None:
            current.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def record(paths: Sequence[str], *, with_processes: bool) -> None:
    """Run tests, and add to the map which lines of the product each of them runs, itself and in its forks;
    `with_processes` also in programs that it starts, each of which then takes a second longer."""
    MAP.mkdir(parents=True, exist_ok=True)
    config = configparser.ConfigParser()
    config["run"] = {
        "include": "".join(f"\n{ROOT / package}/*" for package in PRODUCT),
        "data_file": str(MAP / "lines"),
        "parallel": "true",
        "patch": "_exit",  # how workers, supervisors and ranks end
        "context": "${PYTEST_CURRENT_TEST-}",  # for programs that a test has started
        "disable_warnings": "\nno-data-collected\nmodule-not-imported",
    }
    settings = MAP / "coveragerc"
    with settings.open("w") as file:
        config.write(file)
    tool = [sys.executable, "-m", "coverage"]
    environment = os.environ | {"COVERAGE_OF_RANKS": str(settings)}
    command = [*tool, "run", f"--rcfile={settings}", "-m", "tools.mutate", "--run", *paths]
    if with_processes:
        environment["COVERAGE_PROCESS_START"] = str(settings)
    subprocess.run(command, env=environment, check=False)
    subprocess.run([*tool, "combine", "--append", "--quiet", f"--rcfile={settings}"], check=True)


def run_recorded(paths: Sequence[str]) -> int:
    """The tests in forks of this process, which coverage looks at."""
    recorder = Recorder()
    code = run_pytest([f"--workers={3 * (os.cpu_count() or 1)}", *paths], recorder)
    known = json.loads(SECONDS.read_text("utf-8")) if SECONDS.exists() else {}
    SECONDS.write_text(json.dumps(known | recorder.seconds), "utf-8")
    return code


class TestMap:
    """Which tests run a line of the product, as recorded."""

    def __init__(self) -> None:
        self._data = coverage.CoverageData(str(MAP / "lines"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads(SECONDS.read_text("utf-8"))
        self._lines: dict[str, dict[int, list[str]]] = {}

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """The tests that run the changed line, the quickest first, as many as fit into the time for one mutant: name ->
        seconds."""
        path = str(path_of(mutant.module))
        if path not in self._lines:
            self._lines[path] = self._data.contexts_by_lineno(path)
        lines = self._lines[path]
        places: Iterable[int] = lines_of(path_of(mutant.module).read_text("utf-8"), mutant)
        if not any(_test_of(context) for line in places for context in lines.get(line, ())):
            places = lines  # it runs when the module is imported
        found = {test for line in places for context in lines.get(line, ()) if (test := _test_of(context))}
        tests: dict[str, float] = {}
        total = 0.0
        for test in dict.fromkeys([*self._by_duration(found), *self._starting(mutant.module)]):
            total += self._seconds[test]
            if total > MOST_SECONDS and tests:
                break
            tests[test] = self._seconds[test]
        return tests

    def _by_duration(self, tests: Iterable[str]) -> list[str]:
        return sorted(self._seconds.keys() & set(tests), key=lambda test: self._seconds[test])

    def _starting(self, module: str) -> list[str]:
        """The tests that start programs in which a module may run: those of its own folder first, if it has one."""
        folders = [folder for package in PROGRAMS if module.startswith(f"{package}.") for folder in PROGRAMS[package]]
        own = [f"{folder}/{module.split('.')[1]}" for folder in folders if module.startswith("task_images.")]
        known = self._by_duration(self._seconds)
        return [name for folder in (*own, *folders) for name in known if name.startswith(f"{folder}/")]


def _test_of(context: str) -> str:
    """The test that a context names: `test`, or `test (call)` for the processes that it has started."""
    return re.sub(r" \((?:setup|call|teardown)\)$", "", context)


class Judge:
    """A plugin of pytest: at the first failure it writes the name of the test, and ends the process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.descriptor, report.nodeid.encode())
            os._exit(1)


def run_tests(tests: Sequence[str], seconds: float) -> str | None:
    """Run tests in a child process with all of the project imported anew: the one that fails first, "" if it is not
    known which one or they take more than `seconds`, None if all pass."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            quiet = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(quiet, descriptor)
            code = run_pytest(tests, Judge(writing))
        finally:
            os._exit(code)
    os.close(writing)
    # Not only CPU time: a mutant may wait for ever.
    deadline = time.monotonic() + 5 * seconds
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    # The processes that its tests have started, too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended[0]:
        ended = os.waitpid(child, 0)
    os.set_blocking(reading, False)
    try:
        failed = os.read(reading, 1 << 16).decode()
    except BlockingIOError:
        failed = ""
    os.close(reading)
    return failed if ended[1] else None


def run_pytest(arguments: Sequence[str], *plugins: object) -> int:
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-m", MARKS, *arguments], plugins=plugins))


class Tree:
    """A copy of the project, in which one file at a time is changed: programs that tests start are changed, too. This
    process works in it from now on."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.passing: dict[str, bool] = {}  # whether a test passes without a change
        self._errors: dict[str, Counter[str]] = {}  # that mypy finds in an unchanged module
        self._changes = 0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        if (ROOT / ".mypy_cache").is_dir():
            shutil.copytree(ROOT / ".mypy_cache", self.root / ".mypy_cache")
        temporary = folder / "tmp"
        temporary.mkdir()
        tempfile.tempdir = None
        os.environ.update(PYTHONPATH=str(self.root), TMPDIR=str(temporary), MLBENCH_MACHINE_LOCK="none")
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))

    def breaks_types(self, mutant: Mutant) -> bool:
        """Whether mypy finds something in the changed module that it does not find in the same text without the
        change. Neither has the comments that tell it to ignore something."""
        if mutant.module not in self._errors:
            with self._rewritten(mutant.module, ast.parse):
                self._errors[mutant.module] = self._find_errors(mutant.module)
        with self.changed(mutant):
            return bool(self._find_errors(mutant.module) - self._errors[mutant.module])

    def _find_errors(self, module: str) -> Counter[str]:
        path = str(path_of(module, Path()))
        words = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", path]
        found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()
        return Counter(line.split(": ", 1)[1] for line in found if line.startswith(f"{path}:") and ": error: " in line)

    def changed(self, mutant: Mutant) -> contextlib.AbstractContextManager[None]:
        return self._rewritten(mutant.module, lambda source: mutate(source, mutant))

    @contextlib.contextmanager
    def _rewritten(self, module: str, rewrite: Callable[[str], ast.Module]) -> Iterator[None]:
        path = path_of(module, self.root)
        source, seconds = path.read_text("utf-8"), path.stat().st_mtime
        self._changes += 1
        path.write_text(ast.unparse(rewrite(source)), "utf-8")
        # What Python has compiled belongs to one time of its source, in seconds.
        os.utime(path, (seconds + self._changes, seconds + self._changes))
        try:
            yield
        finally:
            path.write_text(source, "utf-8")
            os.utime(path, (seconds, seconds))


@dataclass(frozen=True)
class Trial:
    """A mutant with the tests that run its line, and how it ended: the test that has killed it, if any has."""

    mutant: Mutant
    tests: dict[str, float]
    end: float  # on the monotonic clock: it is not tried later
    tried: bool = False
    killer: str | None = None


_trees: list[Tree] = []  # one in each process that tries mutants


def start_trials(folder: str) -> None:
    _trees.append(Tree(Path(tempfile.mkdtemp(dir=folder))))


def try_mutant(trial: Trial) -> Trial:
    if time.monotonic() >= trial.end:
        return trial
    return replace(trial, tried=True, killer=_kill(_trees[0], trial.mutant, trial.tests))


def check(mutants: Sequence[Mutant], minutes: float) -> tuple[list[Mutant], int]:
    """The survivors of those mutants for which the time has sufficed, and the number of these."""
    end = time.monotonic() + 60 * minutes
    known = TestMap()
    trials = [Trial(mutant, known.tests_of(mutant), end) for mutant in mutants]
    there = load_third_parties(sorted({test.partition("::")[0] for trial in trials for test in trial.tests}))
    trials = [
        replace(trial, tests={test: seconds for test, seconds in trial.tests.items() if test in there})
        for trial in trials
    ]
    survivors, tried = [], 0
    with (
        tempfile.TemporaryDirectory(prefix="mlbench-mutants-", ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork"), start_trials, (folder,)) as pool,
    ):
        for done in as_completed([pool.submit(try_mutant, trial) for trial in trials]):
            trial = done.result()
            mutant = trial.mutant
            tried += trial.tried
            if trial.killer is not None:
                said = f"  killed, {mutant.module}:{mutant.line}: {mutant}   by {trial.killer}"
                print(said, file=sys.stderr, flush=True)
            elif trial.tried:
                survivors.append(mutant)
                reason = "" if trial.tests else "   (no test runs it)"
                print(f"  survived, {mutant.module}:{mutant.line}: {mutant}{reason}", flush=True)
    return survivors, tried


def _kill(tree: Tree, mutant: Mutant, tests: dict[str, float]) -> str | None:
    """The test that fails because of a mutant, "import or time", or "mypy"; None if nothing notices it."""
    remaining = [test for test in tests if tree.passing.get(test, True)]
    while remaining:
        limit = max(MIN_SECONDS, SLOWER * sum(tests[test] for test in remaining))
        with tree.changed(mutant):
            failed = run_tests(remaining, limit)
        if failed is None:
            break
        if not failed:
            return "import or time" if run_tests(remaining, limit) is None else None
        if failed not in tree.passing:
            tree.passing[failed] = run_tests([failed], limit) is None
        if tree.passing[failed] or failed not in remaining:
            return failed if tree.passing[failed] else None
        remaining = [test for test in remaining if test != failed]
    return "mypy" if tree.breaks_types(mutant) else None


class Collected:
    """A plugin of pytest: the tests that there are."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = {item.nodeid for item in session.items}


def load_third_parties(files: Sequence[str]) -> set[str]:
    """Import once what all children need, and then forget the project's own modules, one of which is mutated. The tests
    in these files; those that were recorded and then renamed are not among them."""
    collected = Collected()
    quiet, saved = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(quiet, 1)
    run_pytest(["--collect-only", *(file for file in files if (ROOT / file).is_file())], collected)
    os.dup2(saved, 1)
    for name in [name for name in sys.modules if name.split(".")[0] in (*PRODUCT, "tests")]:
        del sys.modules[name]
    # Theirs would find the modules of this folder, and not those of a copy.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__.split(".")[0] not in PRODUCT]
    return collected.names


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=TARGETS, help="modules; default: all that are listed")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants of each module, chosen by --seed")
    parser.add_argument("--product", type=int, metavar="N", help="N mutants at random places of the whole product")
    parser.add_argument("--minutes", type=float, default=60, help="most time for the mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, metavar="FILE", help="only the survivors that an earlier run has printed")
    parser.add_argument("--record", nargs="*", metavar="TEST", help="record which lines these tests run; default: all")
    parser.add_argument("--processes", action="store_true", help="with --record: also in programs that tests start")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    if options.run:
        return run_recorded(options.modules)
    if options.record is not None:
        record(options.record or RECORDED, with_processes=options.processes)
        return 0
    if not SECONDS.exists():
        record(RECORDED, with_processes=False)
    chance = random.Random(options.seed)
    modules = list_product() if options.product is not None else options.modules
    by_module = {module: list_mutants(module, path_of(module).read_text("utf-8")) for module in modules}
    everything = [mutant for mutants in by_module.values() for mutant in mutants]
    if options.product is not None:
        # In a random order: what the time does not suffice for is a random part, too.
        mutants = chance.sample(everything, min(options.product, len(everything)))
    elif options.sample is not None:
        mutants = [one for every in by_module.values() for one in chance.sample(every, min(options.sample, len(every)))]
    else:
        mutants = everything
    if options.again is not None:
        again = options.again.read_text("utf-8")
        mutants = [mutant for mutant in everything if f"{mutant.module}:{mutant.line}: {mutant}\n" in again]
    survivors, tried = check(mutants, options.minutes)
    killed = tried - len(survivors)
    print(f"{killed} of {tried} mutants killed, {killed / max(tried, 1):.1%} (seed {options.seed});")
    print(f"for {len(mutants) - tried} of {len(mutants)} there was no time; {len(everything)} are possible")
    explained = EXPLANATIONS.read_text("utf-8")
    unexplained = [mutant for mutant in survivors if str(mutant) not in explained]
    print(f"{len(unexplained)} survivors are not explained in {EXPLANATIONS.relative_to(ROOT)}")
    return 1 if unexplained and options.product is None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
