"""What a wheel says of its release: `python -m tools.release --commit HASH [--images FILE]`.

Writes mlbench_cli/commit.txt, which `mlbench --version` prints, and mlbench_cli/tasks/released.json, by which runs on
clusters get this release's images: the output of `mlbench images push -o json`, which has the registry and the digests.
Git ignores both files. `--clean` removes them.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from mlbench_cli.tasks.images import RELEASED
from mlbench_cli.util.commit import FILE

PACKAGE = Path(__file__).parents[1] / "mlbench_cli"
COMMIT = re.compile("[0-9a-f]{40}")
DIGEST = re.compile("sha256:[0-9a-f]{64}")


def write_release(commit: str, images: Path | None, package: Path = PACKAGE) -> None:
    """Write both files into a package. Raises ValueError for what is no commit, or no digest."""
    if not COMMIT.fullmatch(commit):
        raise ValueError(f"{commit[:60]!r} is no commit: 40 hexadecimal digits")
    (package / FILE).write_text(f"{commit}\n", "ascii")
    if images is None:
        return
    document = json.loads(images.read_bytes())
    for name, digest in document["digests"].items():
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{name} has no digest: {digest[:80]!r}")
    kept = {"registry": document["registry"], "digests": document["digests"]}
    (package / "tasks" / RELEASED.name).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", "utf-8")


def clean(package: Path = PACKAGE) -> None:
    """Remove both files."""
    for path in (package / FILE, package / "tasks" / RELEASED.name):
        path.unlink(missing_ok=True)


def main(argv: list[str]) -> int:
    """2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit")
    parser.add_argument("--images", type=Path, metavar="FILE", help="output of mlbench images push -o json")
    parser.add_argument("--clean", action="store_true", help="remove both files")
    given = parser.parse_args(argv)
    if given.clean:
        clean()
        return 0
    try:
        write_release(given.commit or "", given.images)
    except (OSError, ValueError, KeyError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
