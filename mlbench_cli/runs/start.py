"""From the runs that a request asks for to the plan of its experiment, and the run.json of each new run."""

import os
from collections.abc import Callable, Sequence

from mlbench_cli.model.run import Experiment, JsonObject, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.runs.experiment import Candidate, MemberRow, Plan, make_plan
from mlbench_cli.runs.finished import read_outcome
from mlbench_cli.runs.select import members
from mlbench_cli.storage.store import Store
from mlbench_cli.util.times import now


def plan_experiment(
    experiment: Experiment, candidates: Sequence[Candidate], store: Store, *, retry_failed: bool = False
) -> Plan:
    """What is left to do of an experiment whose members the store knows; new runs get an id and a folder."""
    rows = {row.run.id: row for row in members(store, experiment)}
    existing = []
    for member in experiment.members:
        if (row := rows.get(member.run_id)) is not None:
            existing.append(MemberRow(member, row.run, read_outcome(row)))

    def make_run(spec: RunSpec) -> Run:
        run_id = os.urandom(6).hex()
        return Run(run_id, spec, store.folder / "runs" / run_id, now())

    return make_plan(experiment, existing, candidates, make_run, retry_failed=retry_failed)


def document_writer(command_line: Sequence[str], search: JsonObject | None = None) -> Callable[[Run], None]:
    """Writes run.json with the provenance of the run, which is collected once for each program. `search`: what chose
    its parameters."""
    from mlbench_cli.tasks.provenance import collect_provenance

    known: dict[tuple[str, tuple[str, ...]], JsonObject] = {}

    def write(run: Run) -> None:
        key = (run.spec.task, run.spec.argv)
        if key not in known:
            known[key] = collect_provenance(run.spec, command_line).to_dict()
            if search is not None:
                known[key]["search"] = search
        write_run_document(run, known[key])

    return write
