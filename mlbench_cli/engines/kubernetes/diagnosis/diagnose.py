"""Why a run is stuck, or how it ended: `diagnose`, a pure function of what the API server says.

Typed fields decide; the text of messages and events only if Kubernetes has no field for it. What concerns many
workers alike is one finding. `permanent` means that waiting cannot help; whoever acts on that confirms it first.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlbench_cli.engines.kubernetes.diagnosis.facts import Facts, Object
from mlbench_cli.engines.kubernetes.diagnosis.failures import deadline, failures
from mlbench_cli.engines.kubernetes.diagnosis.pending import held_up, list_unscheduled, not_created, unseen, waiting
from mlbench_cli.engines.kubernetes.diagnosis.scheduling import unschedulable
from mlbench_cli.engines.kubernetes.workers import NodeEnd, Pod, by_worker, failure_of
from mlbench_cli.model.run import Finding, WorkerState
from mlbench_cli.util.text import counted, shorten_line

LISTED = 100  # workers that evidence names at most
_OF_NAMESPACE = re.compile(r"kubectl (?=(?:describe|get) (?!nodes?\b)|logs\b)")


def diagnose(
    job: Object | None,
    pods: Iterable[Pod],
    events: Sequence[Object] = (),
    nodes: Sequence[Object] = (),
    *,
    now: float,
    ends: Mapping[int, NodeEnd] | None = None,
    logs: Mapping[int, str] | None = None,
    states: tuple[WorkerState, ...] | None = None,
    groups: frozenset[str] = frozenset(),
    booking: Object | None = None,
    is_begun: bool = False,
) -> list[Finding]:
    """The findings, the most informative first.

    `now` is in seconds since 1970, `ends` how workers ended by their agents, `logs` the last lines of their logs,
    `states` what follows from pods and ends, if that is known already, `groups` the names of the cluster's API
    groups, `booking` the run's ProvisioningRequest or Workload. `is_begun`: agents of the run have told of themselves.
    """
    newest = by_worker(pods)
    facts = Facts(
        *(job or {}, newest, events, nodes, now, ends or {}, logs or {}, states, groups, booking or {}, is_begun)
    )
    found = _merge_findings(failures(facts))
    if failure_of(facts.job) == "DeadlineExceeded" and "deadline" not in {finding.code for finding in found}:
        found.append(deadline(facts))
    return [_in_namespace(finding, facts.job) for finding in found or _not_started(facts)]


def explain_head(job: Object, pods: Sequence[Pod], events: Sequence[Object], *, now: float) -> Finding | None:
    """Why the head of a run does not run; None if nothing says so. Its workers hold what they cannot send meanwhile."""
    found = _not_started(Facts(job, dict(enumerate(pods[-1:])), events, (), now))
    if not found:
        return None
    words = found[0].evidence.get("message") or found[0].summary
    missing = Finding(
        "head_missing",
        f"The pod that takes in the run's logs and results does not start: {shorten_line(str(words))}",
        hint=f"kubectl describe job {job['metadata']['name']}   The workers hold what they have for 15 minutes.",
        evidence=found[0].evidence,
    )
    return _in_namespace(missing, job)


def _in_namespace(finding: Finding, job: Object) -> Finding:
    """The finding whose command names the run's namespace, unless it is the default one or the command needs none."""
    namespace = job.get("metadata", {}).get("namespace", "default")
    if namespace == "default" or finding.hint is None:
        return finding
    return replace(finding, hint=_OF_NAMESPACE.sub(f"kubectl -n {namespace} ", finding.hint))


def _not_started(facts: Facts) -> list[Finding]:
    """Why pods are not created, have no node, or have no container."""
    pending = waiting(facts)
    without_node = list_unscheduled(pending)
    with_node = {worker: pod for worker, pod in pending.items() if worker not in dict(without_node)}
    unscheduled = unschedulable(facts, without_node) or unseen(facts, with_node)
    return not_created(facts) + unscheduled + _merge_findings(held_up(facts, with_node))


def _merge_findings(found: Iterable[tuple[int, Finding]]) -> list[Finding]:
    """One finding for each code, that of the first worker; it names the others that it concerns."""
    groups: dict[str, list[tuple[int, Finding]]] = {}
    for worker, finding in found:
        groups.setdefault(finding.code, []).append((worker, finding))
    return [_together(group) for group in groups.values()]


def _together(group: Sequence[tuple[int, Finding]]) -> Finding:
    finding = group[0][1]
    if len(group) == 1:
        return finding
    evidence: dict[str, Any] = {**finding.evidence, "workers": [worker for worker, _ in group][:LISTED]}
    others = counted(len(group) - 1, "other worker")
    return replace(finding, summary=f"{finding.summary} (Also {others}.)", evidence=evidence)
