"""Experiments: the runs of a request, and the remaining runs of an existing experiment.

Request + Cluster -> candidates (one spec per point, size and repeat) -> plan (new and remaining runs). Pure.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Cluster, Experiment, Member, Outcome, Run
from mlbench_cli.model.spec import NAME_LENGTH, RunSpec, check_name
from mlbench_cli.runs import launch
from mlbench_cli.runs.matrix import MAX_MEMBERS, hint_for, point_suffix, point_text
from mlbench_cli.runs.request import Request, apply_point, matrix_of, parse_file
from mlbench_cli.tasks.catalog import Task
from mlbench_cli.util.text import shorten

_ATTEMPT = re.compile(r"(.+)-try(\d+)")
_MAX_SHOWN = 3  # maximum number of differences in a message
FROM = "from"  # key in an experiment's request: the id of the run that it repeats
ENTRY = "runs"  # in the point of a member: the entry of its experiment file


class Candidate(Struct, frozen=True, dict=True):
    """A run of a request. `point`: the texts of its matrix point."""

    spec: RunSpec
    point: Mapping[str, str]

    @cached_property
    def content_hash(self) -> str:
        """Identity of a run: a hash of everything that determines what it does."""
        return self.spec.content_hash


# --- request -> candidates ------------------------------------------------------------------------------------------


def expand(
    request: Request,
    cluster: Cluster,
    machine: launch.Machine | None = None,
    tasks: Mapping[str, Task] | None = None,
    find_cluster: Callable[[str], Cluster] | None = None,
    with_defaults: Callable[[Request, Cluster], Request] | None = None,
    marks: Mapping[str, str] | None = None,
    most: int = MAX_MEMBERS,
) -> tuple[Candidate, ...]:
    """The runs of a request in their order: every point and size once, then all again for each repeat.

    `find_cluster` gives the clusters that the matrix names, and `with_defaults` completes the requests of their points;
    points that name none are for `cluster`. `marks` are added to every point.
    Raises UsageError or NotFoundError, as `launch.resolve` does, if any of them cannot work, or for more than `most`.
    """
    if request.parallel is not None and not 1 <= request.parallel <= MAX_MEMBERS:
        raise UsageError(f"run.parallel={request.parallel}: the number must be from 1 to {MAX_MEMBERS}.")
    points = matrix_of(request).points(most)
    clusters = [_cluster_of_point(point, cluster, find_cluster) for point in points]
    if request.parallel not in (None, 1) and any(chosen.provider == "local" for chosen in clusters):
        raise UsageError(
            "run.parallel is for clusters: runs on this machine would share its cores, and their times would be "
            "meaningless.",
            hint="Remove it, or choose a cluster with --cluster.",
        )
    count = len(points) * max(1, len(request.workers)) * max(1, request.repeat or 1)
    if count > most:
        raise UsageError(f"These are {count} runs, more than {most}.", hint=hint_for(count))
    here = machine
    if here is None and any(chosen.provider == "local" for chosen in clusters):
        here = launch.local_machine()  # once, not for each of thousands of points
    specs = [
        _resolve_point(request, point, chosen, here if chosen.provider == "local" else machine, tasks, with_defaults)
        for point, chosen in zip(points, clusters, strict=True)
    ]
    sizes = max(1, len(request.workers))
    candidates = [
        Candidate(spec, point_text({**point, **(marks or {})}))
        for start in range(0, len(specs[0]), sizes)
        for point, of_point in zip(points, specs, strict=True)
        for spec in of_point[start : start + sizes]
    ]
    refuse_duplicates(candidates)
    return tuple(candidates)


def _cluster_of_point(
    point: Mapping[str, Any], cluster: Cluster, find_cluster: Callable[[str], Cluster] | None
) -> Cluster:
    if "cluster" not in point:
        return cluster
    if find_cluster is None:
        raise UsageError(
            "The cluster cannot be a key of this matrix.", hint='In a file of runs: "clusters: [NAME, NAME]".'
        )
    return find_cluster(str(point["cluster"]))


def _resolve_point(
    request: Request,
    point: Mapping[str, Any],
    cluster: Cluster,
    machine: launch.Machine | None,
    tasks: Mapping[str, Task] | None,
    with_defaults: Callable[[Request, Cluster], Request] | None,
) -> tuple[RunSpec, ...]:
    if not point:
        return launch.resolve(apply_point(request, {}), cluster, machine, tasks)
    if request.name is not None:
        check_name(request.name)
        longest = max((len(size.name) for size in launch.sizes(request)), default=0)
        suffix = point_suffix(point, NAME_LENGTH - longest - 1)
        request = replace(request, name=f"{request.name}-{suffix}")
    texts = ", ".join(f"{key}={shorten(text)}" for key, text in point_text(point).items())
    try:
        at_point = apply_point(request, point)
        if "cluster" in point and with_defaults is not None:
            at_point = with_defaults(at_point, cluster)
        return launch.resolve(at_point, cluster, machine, tasks)
    except UsageError as error:
        raise UsageError(f"At {texts} of the matrix: {error.message}", hint=error.hint, details=error.details) from None


def refuse_duplicates(candidates: Sequence[Candidate]) -> None:
    """Raise UsageError if two candidates have the same name or are the same run."""
    by_hash: dict[str, Candidate] = {}
    by_name: dict[str, Candidate] = {}
    for candidate in candidates:
        same = by_hash.setdefault(candidate.content_hash, candidate)
        if same is not candidate:
            raise UsageError(
                f"{same.spec.name} and {candidate.spec.name} would be the same run.",
                hint="To run it several times, use --repeat, or a matrix over seeds without --repeat.",
            )
        same = by_name.setdefault(candidate.spec.name, candidate)
        if same is not candidate:
            raise UsageError(f"Two of these runs would have the same name, {candidate.spec.name}.")


def request_of(experiment: Experiment) -> Request:
    """The request of an experiment as given. Raises UsageError for one of a newer mlbench or of a file."""
    if ENTRY in experiment.request:
        raise UsageError(
            f'The experiment "{experiment.name}" is that of a file with several entries.',
            hint=f"mlbench run {experiment.name}",
        )
    return parse_file(json.dumps({key: value for key, value in experiment.request.items() if key != FROM}))


# --- candidates + experiment -> plan --------------------------------------------------------------------------------


class MemberRow(Struct, frozen=True):
    """A member of an existing experiment with its run. `outcome` is None for an incomplete run."""

    member: Member
    run: Run
    outcome: Outcome | None


class Plan(Struct, frozen=True):
    """The runs to record and to start. `runs` are all requested runs in order, `new` those to record, `left` those to
    start or follow. The others have ended and stay unchanged.
    """

    experiment: Experiment
    runs: tuple[Run, ...]
    new: tuple[Run, ...]
    left: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """Successes, and failures that will not be retried."""
        ids = {run.id for run in self.left}
        return tuple(run for run in self.runs if run.id not in ids)


def make_plan(
    experiment: Experiment,
    existing: Sequence[MemberRow],
    candidates: Sequence[Candidate],
    make_run: Callable[[RunSpec], Run],
    *,
    retry_failed: bool = False,
) -> Plan:
    """The plan that completes `experiment`, whose members are `existing`, to all `candidates`.

    A member with the same content hash is that candidate, whatever its name and whether it shares its machine. If it
    has ended, it is kept. If it was interrupted, or failed with `retry_failed`, a new run with another name replaces
    it. Raises UsageError with the difference for a candidate that contradicts the members.
    """
    by_hash = {row.member.content_hash: row for row in existing}
    wanted = {candidate.content_hash for candidate in candidates}
    members = {row.member.index: row.member for row in existing}
    free = max(members, default=-1) + 1
    new: list[Run] = []
    left: list[Run] = []
    runs: list[Run] = []
    for candidate in candidates:
        row = by_hash.get(candidate.content_hash)
        if row is None and by_hash:  # a run that waited for its machine may be started again with --share-machine
            other = replace(candidate.spec, share_machine=not candidate.spec.share_machine).content_hash
            row = None if other in wanted else by_hash.get(other)
        if row is None:
            _refuse_contradiction(experiment, existing, candidate)
            run = make_run(candidate.spec)
            members[free] = Member(free, run.id, candidate.content_hash, candidate.point)
            free += 1
            new.append(run)
        elif row.outcome is None:
            run = row.run
        elif row.outcome.is_resumable or (retry_failed and not row.outcome.is_success):
            run = make_run(replace(candidate.spec, name=next_attempt(row.run.name)))
            members[row.member.index] = replace(row.member, run_id=run.id, content_hash=candidate.content_hash)
            new.append(run)
        else:
            runs.append(row.run)
            continue
        left.append(run)
        runs.append(run)
    ordered = tuple(members[index] for index in sorted(members))
    return Plan(replace(experiment, members=ordered), tuple(runs), tuple(new), tuple(left))


def next_attempt(name: str) -> str:
    """The name of a further attempt: "x-2-try2" after "x-2", "x-2-try3" after that."""
    found = _ATTEMPT.fullmatch(name)
    base, number = (found[1], int(found[2]) + 1) if found else (name, 2)
    suffix = f"-try{number}"
    if len(base) + len(suffix) > NAME_LENGTH:
        raise UsageError(
            f'The name "{name}" is too long to append "{suffix}".',
            hint=f"mlbench delete {name} --yes, then repeat the command",
        )
    return base + suffix


def _refuse_contradiction(experiment: Experiment, existing: Sequence[MemberRow], candidate: Candidate) -> None:
    """Refuse a further run that differs from the members of its entry in more than size, seed and matrix point."""
    existing = [row for row in existing if row.member.point.get(ENTRY) == candidate.point.get(ENTRY)]
    if not existing:
        return
    keys = {key for row in existing for key in row.member.point}
    if (not keys and candidate.point) or (keys and not candidate.point):
        raise _contradiction(experiment, ["the matrix"])
    peers = [row for row in existing if row.member.point == candidate.point]
    axes = set() if peers else {*candidate.point, *keys}
    ours = _comparable(candidate.spec, axes)
    for row in peers or existing:
        theirs = _comparable(row.run.spec, axes)
        differences = find_differences(theirs, ours)
        if differences:
            raise _contradiction(experiment, differences, _hint_for_cores(theirs, ours))


def _hint_for_cores(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """A hint for growing an experiment if the new sizes would leave fewer cores for the ranks of all sizes; else
    empty."""
    if {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} != {"cpus"}:
        return ""
    return f"; or use the cores of the existing runs: --num-cpus {before.get('cpus', 1):g}"


def _contradiction(experiment: Experiment, differences: Sequence[str], advice: str = "") -> UsageError:
    shown = "; ".join(differences[:_MAX_SHOWN])
    more = f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    return UsageError(
        f'The experiment "{experiment.name}" exists and differs from this request: {shown}{more}.',
        hint=f"Choose another name, resume without changes (mlbench run {experiment.name}), "
        f"or: mlbench delete {experiment.name}{advice}",
        details={"differences": list(differences)},
    )


def find_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The differences between two specs as JSON values: 'backend was "gloo", now "mpi"'."""
    found = []
    for key in sorted({*before, *after}, key=lambda key: (key not in ("task", "argv"), key)):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [f"{key}.{text}" for text in find_differences(old, new)]
        elif old != new:
            found.append(f"{'command' if key == 'argv' else key} was {_show(old)}, now {_show(new)}")
    return found


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = shlex.join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not given" if value is None else shorten(f'"{value}"' if isinstance(value, str) else str(value))


def _comparable(spec: RunSpec, axes: Collection[str]) -> dict[str, Any]:
    """What all points of a matrix with these axes share: "set.lr" may change lr, and {lr} in the command."""
    content = spec.content()
    varied = {axis.removeprefix("set.") for axis in axes if axis.startswith("set.")}
    content["argv"] = content.pop("template", content["argv"])
    for field, prefix in (("parameters", ""), ("method", "comm.")):
        content[field] = {name: value for name, value in content[field].items() if prefix + name not in varied}
    ignored = {"workers", "seed", "share_machine", *_axis_fields(axes)}
    return {key: value for key, value in content.items() if key not in ignored}


# Option -> the fields of a spec that it decides, where their names differ.
_DECIDES: Mapping[str, tuple[str, ...]] = {
    "task": ("task", "argv", "parameters", "image", "preset", "backend"),
    "preset": ("preset", "parameters"),
    "set": (),
    "command": ("argv", "template", "task", "preset"),
    "backend": ("backend", "run_on_all"),
    "custom_backend": ("backend", "run_on_all"),
    "gpu": ("device", "gpus_per_worker", "processes_per_worker", "backend", "cpus"),
    "light": ("goal",),
    "budget": ("parameters",),
    "cluster": (
        *("cluster", "cluster_kind", "engine", "image", "cpus", "price", "functional_only", "kubernetes", "timeout"),
        *("gpus_per_worker", "processes_per_worker", "data_dir"),
    ),
    "num_cpus": ("cpus",),
    "processes_per_worker": ("processes_per_worker", "cpus"),
    "gpus_per_worker": ("gpus_per_worker", "processes_per_worker", "cpus"),
}


def _axis_fields(axes: Collection[str]) -> set[str]:
    """The fields of a spec that may differ between points of a matrix with these axes."""
    names = {key.partition(".")[0] for key in axes if key != ENTRY}
    known = set(RunSpec.__struct_fields__)
    return {
        field for name in names for field in _DECIDES.get(name, (name,) if name in known else ("kubernetes", "image"))
    }


# --- the request, compared ------------------------------------------------------------------------------------------


def absolute_paths(request: Request) -> Request:
    """The request with absolute paths, as it is recorded, so that it does not depend on the current folder."""
    changes = {
        name: os.path.abspath(os.path.expanduser(value))
        for name in ("data_dir", "pod_patch")
        if (value := getattr(request, name)) and "\0" not in value
    }
    return replace(request, **changes)
