"""Files that a command writes: one rule for the exit code if they cannot be written, whatever the command."""

from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.storage.store import Store
from tests.unit.results.runs import record_sealed

CERTIFICATE = Path(__file__).parents[3] / "results" / "certificates" / "healthy" / "archive.zip"
COMMANDS = {
    "report": "report X.html a-1",
    "report-md": "report X.md a-1",
    "charts": "charts X a-1",
    "csv": "export csv X.csv a-1",
    "download": "download a-1 --to X.zip",
    "folder": "download a-1 --to X",
    "bundle": "download a-1 b-1 --to X.zip",
    "junit": "gate a-1 --baseline b-1 --junit X.xml",
    "bencher": "gate a-1 --baseline b-1 --bencher X.json",
    "tracker": "gate a-1 --baseline b-1 --action-benchmark X",
    "receipt": "reproduce a-1 --with b-1 --receipt X.json",
    "save": "run c 1 --command true --share-machine --save X.yaml --dry-run",
    "table": "run -f t.yaml --only-report --to X",
    "site": "site ARCHIVES --to X",
    "certificate": "certify --from CERTIFICATE --to X",
}


@pytest.fixture(autouse=True)
def sources(home: Path) -> None:
    store = Store()
    for name, seconds in (("a-1", 90.0), ("b-1", 91.0)):
        record_sealed(store, name, 1, seconds)
    store.close()
    Path("file").write_text("no folder\n")
    Path("t.yaml").write_text("runs: [{command: 'true', workers: 1, share-machine: true}]\n")


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(("folder", "code"), [("file", 2), ("/sys/none", 3)], ids=["no-folder", "no-permission"])
def test_what_cannot_be_written_has_one_exit_code_everywhere(
    capsys: pytest.CaptureFixture[str], words: str, folder: str, code: int
) -> None:
    if not folder.startswith("file") and not Path("/sys").is_dir():
        pytest.skip("no folder in which not even root may write")
    if "ARCHIVES" in words:
        assert run(["download", "a-1", "b-1", "--to", "ARCHIVES"]) == 0
    if "t.yaml" in words:
        assert run(["run", "-f", "t.yaml"]) == 0
    argv = [word.replace("X", f"{folder}/x").replace("CERTIFICATE", str(CERTIFICATE)) for word in words.split()]
    assert run(argv) == code, capsys.readouterr().err
    message = capsys.readouterr().err
    assert folder in message
    assert "cannot be written: " in message
