"""An archive verifies alike on every Python, whichever sealed it.

Since 3.12 `sum` compensates for rounding. The golden archive holds timings like those of a GPU (milliseconds that were
rounded to 32 bits, divided by 1000 and added up), of which both sums differ.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.zip"))
ROOT = Path(__file__).parents[4]
PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import verify
for path in map(Path, sys.argv[1:]):
    found = verify(path)
    with Archive.open(path) as archive:
        print(json.dumps([path.name, found.ok, archive.result["official_line"]]))
"""


def find_pythons() -> list[str]:
    """Every Python from 3.11 on of this machine, this one among them: on the path, of pyenv or of GitHub's runners."""
    found = {sys.version_info[1]: sys.executable}
    folders = [*Path.home().glob(".pyenv/versions/*/bin"), *Path("/opt/hostedtoolcache/Python").glob("*/x64/bin")]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    for minor in range(11, 20):
        python = shutil.which(f"python3.{minor}", path=path)
        if python and minor not in found and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
            found[minor] = python
    return [found[minor] for minor in sorted(found)]


def test_every_python_verifies_what_any_has_sealed() -> None:
    pythons = find_pythons()
    answers = []
    for python in pythons:
        words = [python, "-I", "-S", "-c", PROGRAM, str(ROOT), *map(str, GOLDEN)]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        assert done.returncode == 0, done.stderr
        answers.append([json.loads(line) for line in done.stdout.splitlines()])
    assert all(answer == answers[0] for answer in answers)
    ((_, ok, line),) = answers[0]
    assert ok
    assert "Compute: 54.790 seconds" in line


@pytest.mark.skipif(len(find_pythons()) < 2, reason="one Python from 3.11 on: there is no second one to compare with")
def test_two_pythons_seal_the_same_evidence_to_the_same_bytes(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from mlbench_cli.results.archive.evidence import load_evidence\n"
        "from mlbench_cli.results.archive.judge import judge\n"
        "from mlbench_cli.results.archive.reader import Archive\n"
        "from mlbench_cli.util.json_text import format_document\n"
        "with Archive.open(Path(sys.argv[2])) as archive:\n"
        "    found = judge(load_evidence(archive))\n"
        "for document in found.documents.values(): sys.stdout.buffer.write(format_document(document))\n"
        "print(found.official_text)\n"
    )
    texts = {
        subprocess.run([python, "-I", "-S", "-c", code, str(ROOT), str(GOLDEN[0])], capture_output=True).stdout
        for python in find_pythons()
    }
    (text,) = texts
    assert b"Compute: " in text
