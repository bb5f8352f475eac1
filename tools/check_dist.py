"""Check the contents of a wheel and a source distribution: `python -m tools.check_dist dist`.

Every file that the program reads at run time has to be in both, and nothing that only this repository needs.
"""

import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("mlbench_cli", "providers", "templates", "task_images")
FORBIDDEN = ("tests/", "benchmarks/", "tools/", "docs/", "shared/", "demo/", ".ci/", ".github/", "__pycache__/")


def expected_files(root: Path = ROOT) -> set[str]:
    """Names of all files of the packages in the work tree, relative to `root`, with "/" between parts."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file())
    names = {path.relative_to(root).as_posix() for path in files}
    return {name for name in names if "__pycache__" not in name and not name.endswith((".pyc", ".pyo"))}


def list_wheel(path: Path) -> set[str]:
    """Names in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {*wheel.namelist()}


def list_sdist(path: Path) -> set[str]:
    """Names in a source distribution without its leading folder."""
    with tarfile.open(path) as sdist:
        return {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}


def find_problems(names: set[str], expected: Iterable[str], licenses: Iterable[str]) -> list[str]:
    """What is missing from, or must not be in, a distribution that holds the files `names`."""
    problems = [f"{name} is missing" for name in sorted({*expected, *licenses} - names)]
    problems += [f"{name} does not belong in it" for name in sorted(names) if name.startswith(FORBIDDEN)]
    return problems


def check_folder(folder: Path) -> list[str]:
    """Problems of the one wheel and the one source distribution in `folder`."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{folder} holds {len(wheels)} wheels and {len(sdists)} source distributions instead of one each"]
    expected = expected_files()
    info = "-".join(wheels[0].name.split("-")[:2]) + ".dist-info"
    found = find_problems(list_wheel(wheels[0]), expected, [f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"])
    problems = [f"{wheels[0].name}: {problem}" for problem in found]
    top = ["LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"]
    return problems + [
        f"{sdists[0].name}: {problem}" for problem in find_problems(list_sdist(sdists[0]), expected, top)
    ]


def main(argv: list[str]) -> int:
    problems = check_folder(Path(argv[0] if argv else "dist"))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print("The wheel and the source distribution hold what they need, and no more.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
