"""run.json: the request, written before anything of a run is started."""

import json
from collections.abc import Mapping
from typing import Any

from mlbench_cli import __version__
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import canonical_json
from mlbench_cli.results.archive.documents import RunDocument
from mlbench_cli.storage.run_folder import RUN, RunFolder
from mlbench_cli.tasks.catalog import find_rules
from mlbench_cli.util.json_text import format_document


def run_document(run: Run, provenance: Mapping[str, Any] | None = None, repeats: int | None = None) -> RunDocument:
    """run.json without its schema version, as plain JSON values."""
    spec = run.spec
    rules = find_rules(spec.task, spec.preset)
    return {
        "id": run.id,
        "name": run.name,
        "created": run.created,
        "spec_hash": spec.hash,
        "spec": json.loads(canonical_json(spec.to_dict())),
        "task": None if rules is None else rules.to_dict(),
        "mlbench": __version__,
        "provenance": None if provenance is None else dict(provenance),
        **({} if repeats is None else {"repeats": repeats}),  # type: ignore[typeddict-item]
    }


def write_run_document(run: Run, provenance: Mapping[str, Any] | None = None, repeats: int | None = None) -> None:
    """Write run.json into the run's folder, before anything is started. Raises OSError."""
    RunFolder(run.folder).write(RUN, format_document(run_document(run, provenance, repeats)))
