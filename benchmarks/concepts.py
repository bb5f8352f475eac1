"""How many places do the same kind of thing: states of a run, deciders of its end, locks, atomic writes, and so on.

    python benchmarks/concepts.py [--list] [--at COMMIT]

Each concept has a rule about the syntax of a function or class, so a new copy counts as soon as it is written. A place
is a function or class; modules are what a reader has to open. `review` is what a reader of the third edition counted
by hand (commit 670742a9; other units: vocabularies, ways, files). `--at` counts in another commit by the same rules.
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mlbench_cli", "providers", "templates")
RUNNING = ("mlbench_cli/agent/", "mlbench_cli/engines/", "mlbench_cli/runs/", "mlbench_cli/storage/", "templates/")
STATES = "pending queued submitted waiting starting running ended finished exited succeeded failed canceled lost alive"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Concept:
    """What counts as one place, among the nodes of a function without those of functions inside it, or of a class."""

    name: str
    review: int
    is_place: Callable[[ast.AST, list[ast.AST]], bool]
    where: tuple[str, ...] = ("",)


def called(node: ast.AST) -> str:
    """The name that a call calls, e.g. "os.replace", ".rename" or "Popen"; empty for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return f"{owner.id if isinstance(owner, ast.Name) else ''}.{node.func.attr}"
    return node.func.id if isinstance(node.func, ast.Name) else ""


def calls(pattern: str) -> Callable[[ast.AST, list[ast.AST]], bool]:
    return lambda place, nodes: isinstance(place, Function) and any(re.fullmatch(pattern, called(it)) for it in nodes)


def returns(pattern: str, name: str = "") -> Callable[[ast.AST, list[ast.AST]], bool]:
    return lambda place, nodes: (
        isinstance(place, Function)
        and place.returns is not None
        and re.search(rf"\b({pattern})\b", ast.unparse(place.returns)) is not None
        and re.search(name, place.name) is not None
    )


def is_state_enum(place: ast.AST, nodes: list[ast.AST]) -> bool:
    if not isinstance(place, ast.ClassDef) or not any("Enum" in ast.unparse(base) for base in place.bases):
        return False
    words = {it.value for it in nodes if isinstance(it, ast.Constant)}
    return len(words & set(STATES.split())) > 1


def is_flag(place: ast.AST, nodes: list[ast.AST]) -> bool:
    decorators = place.decorator_list if isinstance(place, Function) else []
    return returns("bool")(place, nodes) and "property" in map(ast.unparse, decorators)


def decides_ending(place: ast.AST, nodes: list[ast.AST]) -> bool:
    """It returns or stores an ending, or names one other than to compare with it."""
    if not isinstance(place, Function):
        return False
    compared = {id(part) for it in nodes if isinstance(it, ast.Compare) for part in ast.walk(it)}
    words = [ast.unparse(it) for it in nodes if isinstance(it, ast.Attribute) and id(it) not in compared]
    stored = [ast.unparse(target) for it in nodes if isinstance(it, ast.Assign) for target in it.targets]
    named = any(word.startswith("Ending.") for word in words) or any(word.endswith("['ended']") for word in stored)
    given = any(
        isinstance(it, ast.keyword) and it.arg == "ended" and not isinstance(it.value, ast.Constant) for it in nodes
    )
    return named or given or returns("Ending")(place, nodes)


def moves_file(place: ast.AST, nodes: list[ast.AST]) -> bool:
    """os.replace, os.rename, Path.rename, and Path.replace, whose one argument tells it from str.replace."""
    moves = (it for it in nodes if re.fullmatch(r"os\.(replace|rename)|\w*\.(rename|replace)", called(it)))
    return isinstance(place, Function) and any(
        called(it).startswith("os.") or (isinstance(it, ast.Call) and len(it.args) == 1 and not it.keywords)
        for it in moves
    )


def translates(place: ast.AST, nodes: list[ast.AST]) -> bool:
    """It puts a message into bytes, or takes it out of them, and sends, receives or ends lines itself."""
    is_codec = calls(r"json\.(dumps|loads)|struct\.(pack|unpack)")(place, nodes)
    ends_lines = any(isinstance(it, ast.Constant) and it.value == b"\n" for it in nodes)
    return is_codec and (
        ends_lines or calls(r"\w*\.(send|sendall|sendmsg|send_fds|recv|recvmsg|recv_fds)")(place, nodes)
    )


def asks_for_life(place: ast.AST, nodes: list[ast.AST]) -> bool:
    """It asks the kernel, or decides by what others have said."""
    asks = any(called(it) == "os.kill" and isinstance(it, ast.Call) and ast.unparse(it.args[1]) == "0" for it in nodes)
    return asks or returns("bool|QueueState|Liveness", r"_(alive|live|dead|locked|held|liveness|state)$")(place, nodes)


CONCEPTS = (
    Concept("state of a run: enums", 7, is_state_enum, (*RUNNING, "mlbench_cli/model/")),
    Concept("state of a run: yes-or-no properties", 12, is_flag, RUNNING),
    Concept("how did it end", 5, decides_ending, RUNNING),
    Concept(
        "not started yet", 5, returns("bool", "start|begun|wait|queue|submit|pending|absent|releas|_in_line"), RUNNING
    ),
    Concept("log follower", 5, returns("LogLine|LogPiece|LogItem"), RUNNING),
    Concept("fetcher", 4, returns("Fetched"), RUNNING),
    Concept("observer", 3, calls("Observation|Snapshot|NodeReport|WorkerState"), RUNNING),
    Concept("diagnosis", 4, calls("Finding"), RUNNING),
    Concept("wire format", 6, translates, ("mlbench_cli/agent/", "mlbench_cli/engines/", "templates/")),
    Concept("atomic write", 20, moves_file),
    Concept("lock", 18, calls(r"fcntl\.(flock|lockf|fcntl)")),
    Concept("liveness", 6, asks_for_life, RUNNING),
    Concept("spawn", 6, calls(r"\w*\.?(Popen|posix_spawn|fork)"), RUNNING),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print each place")
    parser.add_argument("--at", metavar="COMMIT", help="count in this commit instead of the files here")
    options = parser.parse_args()
    modules = [(path, ast.parse(text)) for path, text in sources(options.at)]
    print(f"{'concept':40} review  places  modules")
    for concept in CONCEPTS:
        found = [
            f"{path}:{name}"
            for path, tree in modules
            if path.startswith(concept.where)
            for name, place, nodes in places(tree)
            if concept.is_place(place, nodes)
        ]
        print(f"{concept.name:40} {concept.review:6}  {len(found):6}  {len({it.partition(':')[0] for it in found}):7}")
        if options.list:
            print(*(f"    {place}" for place in found), sep="\n")


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of each module of the product."""
    if commit is None:
        for path in sorted(it for package in PACKAGES for it in (ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")
        return
    packed = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)):
                yield member.name, file.read().decode()


def places(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST, list[ast.AST]]]:
    """Each function and class with its name and its own nodes."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child, list(own_nodes(child))
            yield from places(child, f"{prefix}{child.name}.")
        else:
            yield from places(child, prefix)


def own_nodes(place: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(place):
        if not isinstance(child, Function | ast.ClassDef):
            yield child
            yield from own_nodes(child)


if __name__ == "__main__":
    main()
