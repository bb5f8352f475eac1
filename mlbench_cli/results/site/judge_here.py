"""The judge of one archive in a reader's browser. Only the modules imported here are shipped."""

import hashlib
import json
from pathlib import Path

from mlbench_cli.errors import MlbenchError
from mlbench_cli.results.analysis.series import measure
from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.storage import run_folder


def check(path: str) -> str:
    """The result of `mlbench verify` for an archive as JSON, and the figures to compare with the page.

    `problems` are sentences of `mlbench verify`. If there are none, `seconds` is the run's time, and `sums` and
    `signature` are for checking its signature.
    """
    place = Path(path)
    found = verify(place)
    answer: dict[str, object] = {
        "problems": [str(problem) for problem in found.problems],
        "not_derived": list(found.not_derived),
        "notes": list(found.notes),
    }
    with open(place, "rb") as file:
        answer["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    if not found.problems:
        try:
            answer |= _read(place)
        except MlbenchError as error:
            answer["problems"] = [error.message]
    return json.dumps(answer)


def _read(place: Path) -> dict[str, object]:
    with Archive.open(place, is_shown=True) as archive:
        sums = archive.read(run_folder.SUMS, layout.MAX_SUMS_BYTES)
        signed = run_folder.SIGNATURE in archive.names
        return {
            "run": archive.run["name"],
            "mlbench": archive.run.get("mlbench"),
            "seconds": measure(archive).seconds,
            "summary": archive.result["summary"],
            "official": archive.result["official_line"],
            "digest": hashlib.sha256(sums).hexdigest(),
            "sums": sums.decode() if signed else None,
            "signature": archive.read(run_folder.SIGNATURE).decode() if signed else None,
        }
