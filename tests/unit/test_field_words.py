"""Things are found by searching for the field's words; names of the first edition's dialect are gone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("mlbench_cli", "providers", "templates", "task_images")

# What a person searches for, in any case and with "_" for a space, and the definition that answers.
THINGS = {
    "os error": "mlbench_cli.results.archive.layout:naming_file_on_os_error",
    "problems": "mlbench_cli.results.archive.verify:find_problems",
    "summary": "mlbench_cli.engines.kubernetes.workers:_apply_summary",
    "states": "mlbench_cli.engines.kubernetes.diagnosis.facts:states",
    "held archive": "mlbench_cli.engines.kubernetes.fetch:HeldArchive",
    "parse held archive": "mlbench_cli.engines.kubernetes.fetch:parse_held_archive",
    "inheritable lock": "providers.file_locks:inheritable_lock",
    "cleanup": "providers.workload_cleanup:WorkloadCleanup",
    "snapshot": "providers.workload_cleanup:CleanupSnapshot",
    "orphan": "providers.workloads:OrphanedResource",
    "list orphans": "providers.eks.orphans:list_orphans",
    "EKS resource": "providers.eks.control_plane:EksResource",
    "GKE resource": "providers.gke.resources:GkeResource",
    "creation": "providers.lifecycle:Creation",
    "deletion": "providers.lifecycle:Deletion",
    "operation": "providers.lifecycle:Operation",
    "resource state": "providers.lifecycle:ResourceState",
    "existing": "providers.lifecycle:existing",
    "side effects": "providers.lifecycle:has_side_effects",
    "error budget": "providers.lifecycle:error_budget_spent",
    "error from code": "providers.eks.aws:error_from_code",
    "error from message": "providers.eks.control_plane:error_from_message",
    "cloud errors": "providers.gke.api:map_cloud_errors",
    "find raw": "providers.eks.control_plane:find_raw",
    "require raw": "providers.gke.resources:require_raw",
    "new cluster": "providers.base:new_cluster",
    "helm": "providers.helm.tool:find_helm",
    "render": "providers.helm.tool:render_template",
    "chart": "providers.helm.install:prepare_chart",
    "fetch chart": "providers.helm.source:fetch_chart",
    "values": "providers.helm.values:merge_values",
    "kubeconfig": "mlbench_cli.kube.access:compose_kubeconfig",
    "tags": "providers.base:ownership_tags",
    "finalize": "mlbench_cli.runs.finalize:finalize",
    "finished": "mlbench_cli.runs.finished:read_finished",
    "observation": "mlbench_cli.model:Observation",
    "outcome": "mlbench_cli.model:Outcome",
    "observer": "mlbench_cli.engines.kubernetes.observe:RunObserver",
    "follower": "mlbench_cli.engines.kubernetes.follower:RunFollower",
    "queued": "mlbench_cli.engines.local.state:is_queued",
    "enqueue": "mlbench_cli.engines.local.state:enqueue",
    "abandon": "mlbench_cli.engines.local.state:abandon",
    "samples": "task_images.allreduce.measure:MIN_SAMPLES",
    "helm version": "providers.helm.tool:MIN_HELM_VERSION",
    "parallel fetches": "mlbench_cli.engines.kubernetes.results:MAX_PARALLEL_FETCHES",
    "permanent": "mlbench_cli.runs.supervise:_permanent_findings",
    "exec": "mlbench_cli.engines.local.supervisor:_exec_command",
    "marker": "mlbench_cli.engines.kubernetes.observe:_parse_marker",
    "survivors": "mlbench_cli.engines.kubernetes.ending:_survivors_are_stuck",
    "session": "task_images.harness.session:training_session",
    "rendezvous": "task_images.cifar10_resnet20_tensorflow.rendezvous:rendezvous",
    "goal passed": "task_images.harness.goals:GoalPassed",
    "buffers": "task_images.allreduce.operations:Buffers",
    "checkpoint": "task_images.harness.classification:CheckpointedSettings",
    "backoff": "mlbench_cli.kube.api:_Backoff",
    "readiness": "providers.base:Readiness",
    "retry": "mlbench_cli.kube.api:RETRY_SECONDS",
    "adopt": "mlbench_cli.engines.kubernetes.submit:_adopt_job",
    "deadline": "mlbench_cli.errors:DeadlineError",
    "world size": "mlbench_cli.spec:world_size",
}
FORMER_NAMES = re.compile(
    r"_?(?:held|Held|judged\w*|translated|rendered|prepared|fetched|merged|composed|described|Leavings|Leftover|leftover"
    r"|left_behind|Seen|Made|Making|Removing|touched|from_marks|settle|settled|seen_as"
    r"|snapshot_of_settled|Looker|Following|save_look|in_line|stand_in_line|give_up|MOST|LEAST_SAMPLES|OLDEST|AT_ONCE"
    r"|hopeless|become|undressed|spoken|waits_in_vain|opening|Passage|Ground|LongSettings)"
)


def list_definitions() -> Iterator[tuple[str, str]]:
    """Module and name of every function, class and constant that is shipped."""
    for path in sorted(path for package in SHIPPED for path in (ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield module, node.name
            elif (
                isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
            ):
                yield module, node.targets[0].id


@pytest.fixture(scope="module")
def definitions() -> set[str]:
    return {f"{module}:{name}" for module, name in list_definitions()}


def test_each_thing_is_found_by_the_word_of_the_field(definitions: set[str]) -> None:
    assert len(THINGS) == 60
    missing = {word: place for word, place in THINGS.items() if place not in definitions}
    assert not missing
    for word, place in THINGS.items():
        searched = word.replace(" ", "").lower()
        assert searched in place.replace("_", "").lower(), f'a search for "{word}" does not find {place}'


def test_no_definition_has_a_name_of_the_dialect(definitions: set[str]) -> None:
    former = {place for place in definitions if FORMER_NAMES.fullmatch(place.rpartition(":")[2])}
    assert not former


def test_a_class_has_one_meaning_in_the_tool() -> None:
    """Tasks are programs of their own, and the two clouds have the same things under the same names."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "mlbench_cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    same = {"FetchError"}  # what an engine could not fetch
    assert not {name: found for name, found in places.items() if len(found) > 1 and name not in same}
