"""Find contradictions in evidence. Each one is a finding and removes the official line.

Someone who edits all evidence consistently can still forge a run. These checks find parts that cannot both be true: an
incomplete edit, a clock that was changed, a program that measures wrongly.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.model.run import LOCAL, Finding, Observation, Outcome, Phase
from mlbench_cli.model.spec import CUSTOM, OPEN
from mlbench_cli.results.archive.conditions import find_fault_contradictions
from mlbench_cli.results.archive.evidence import MAX_LINE_BYTES, Evidence, ReportedFacts, SampleWatch, find_step
from mlbench_cli.util.text import one_line, significant
from mlbench_cli.util.times import parse_timestamp

CLOCK_STEPPED = "clock_stepped"
NO_RESULT = "no_result"
PREFIX = "implausible_"
SLACK_SECONDS = 5.0  # error of times recorded by processes that had to wait for a CPU
RECORD_SLACK_SECONDS = 3600.0  # a run may be recorded long before it starts, and the clock may be corrected in between
SHARE = 0.01  # by which two clocks of a rank may differ
CLOCK_SLACK_SECONDS = 1.0  # between reading one clock and the other
SHORT_SECONDS = 0.05
END_SECONDS = 60.0  # for an agent to end leftover processes and take its last sample
MAX_REASONS = 5
_OWN_LOGS = ("local", "hosts", "slurm")  # engines that keep each rank's complete log, and sample its size
# Options that a trainer reports as used, not as requested.
_AS_USED = ("precision", "compile")
_HELD, _SHARED = "held", "shared"  # states of a machine's lock, see agent/lock.py


def find_clock_step(observation: Observation, samples: SampleWatch) -> Finding | None:
    """The finding that a machine's wall clock was changed during the run, or None."""
    steps = [
        find_step(worker.finished - worker.started, worker.seconds)
        for worker in observation.workers
        if worker.seconds is not None and worker.started is not None and worker.finished is not None
    ]
    noted = [clock.stepped_seconds for clock in observation.clocks]
    stepped = max([*steps, *noted, samples.stepped_seconds], default=0.0)
    if not stepped:
        return None
    nodes = sorted({clock.node for clock in observation.clocks if clock.node and clock.stepped_seconds})
    where = f"of {nodes[0]} " if len(nodes) == 1 else ""
    return Finding(
        CLOCK_STEPPED,
        f"The wall clock {where}was set by {significant(stepped)} s while the ranks ran.",
        hint="Durations from the monotonic clock are still valid. Check NTP (chronyc tracking), and that the machine "
        "does not sleep; then run it again.",
        evidence={"stepped_seconds": round(stepped, 3), "nodes": nodes},
    )


def find_contradictions(
    evidence: Evidence,
    reported: ReportedFacts,
    samples: SampleWatch,
    is_success: bool,
    *,
    is_stepped: bool,
    measured: Iterable[str] = (),
) -> list[Finding]:
    """Contradictions in the evidence, one finding per kind.

    `is_success`: the run succeeded, so nothing may be missing. `is_stepped`: a clock was changed during the run, so
    wall times prove nothing. `measured`: contradictions in what the task measured.
    """
    checks = {
        "task_time": _check_task_time(evidence, reported),
        "clocks": [] if is_stepped else _check_clocks(evidence, reported),
        "event_times": [] if is_stepped else _check_event_times(evidence, reported, samples),
        "worker_times": [] if is_stepped else _check_worker_times(evidence),
        "ranks": _check_ranks(evidence, is_success),
        "logs": _check_logs(evidence, reported, samples, is_success),
        "settings": _check_settings(evidence, reported, samples, is_success),
        "figures": _check_figures(reported),
        "provenance": _check_provenance(evidence, reported),
        "faults": find_fault_contradictions(evidence.spec, evidence.faults),
        "samples": measured,
    }
    return [
        Finding(
            PREFIX + name,
            f"The evidence contradicts itself: {'; '.join(islice(found, MAX_REASONS))}.",
            hint="Run it again. If it happens again with an unchanged archive, report it as a bug in the task or in "
            "mlbench.",
            evidence={"contradictions": list(islice(found, MAX_REASONS))},
        )
        for name, problems in checks.items()
        if (found := list(problems))
    ]


def find_too_long(reported: ReportedFacts) -> Finding | None:
    """The finding that events were ignored because they were too long."""
    logs = {rank: facts.counts.too_long for rank, facts in reported.logs.items() if facts.counts.too_long}
    if not logs:
        return None
    rank = min(logs)
    return Finding(
        "event_too_long",
        f"The log of rank {rank} holds {logs[rank]} event{'s' if logs[rank] > 1 else ''} of more than "
        f"{MAX_LINE_BYTES >> 20} MiB, which {'were' if logs[rank] > 1 else 'was'} ignored.",
        hint="Report less in details, or write it to a file in MLBENCH_OUTPUT_DIR.",
        evidence={"events": {str(number): count for number, count in logs.items()}},
    )


def find_ignored(reported: ReportedFacts) -> Finding | None:
    """The finding that malformed events were ignored."""
    logs = {rank: facts.counts for rank, facts in reported.logs.items() if facts.counts.ignored}
    if not logs:
        return None
    rank = min(logs)
    count, total = logs[rank].ignored, sum(counts.ignored for counts in logs.values())
    others = f", and {total - count} of other ranks" if total > count else ""
    return Finding(
        "event_ignored",
        f"{count} event{'s' if count > 1 else ''} of rank {rank}{others} {'were' if total > 1 else 'was'} ignored. The "
        f"first: {logs[rank].why}.",
        hint="docs/tutorial/own-training.md shows how a program reports events.",
        evidence={"events": {str(number): counts.ignored for number, counts in logs.items()}, "first": logs[rank].why},
    )


def find_unreported_goal(evidence: Evidence, reported: ReportedFacts) -> Finding | None:
    """The finding that a user's command never reported the metric of the goal that it was measured against."""
    goal = evidence.goal if evidence.spec.preset == OPEN else None
    if goal is None or any(name in reported.metrics for name in goal.metric_names) or reported.result is not None:
        return None
    names = ", ".join(map(one_line, list(reported.metrics)[:5]))
    return Finding(
        "goal_never_reported",
        f"The command never reported {goal.metric_names[-1]}, the metric of the goal"
        f"{f' (only {names})' if names else ''}.",
        hint=f'from mlbench import emit; emit("metric", name="{goal.metric_names[-1]}", value=...)',
    )


def _check_task_time(evidence: Evidence, reported: ReportedFacts) -> Iterator[str]:
    wall = (reported.result or {}).get("wall_seconds")
    seconds = evidence.observation.seconds
    longest = max((worker.seconds or 0.0 for worker in evidence.observation.workers), default=0.0)
    if seconds is not None and longest > seconds + SHORT_SECONDS:
        yield f"a rank ran for {longest:.6g} s, longer than the run ({seconds:.6g} s)"
    if seconds is None:
        started, finished = evidence.span
        seconds = None if started is None else finished - started + 1  # Kubernetes reports whole seconds
    is_resumed = bool(evidence.spec.parameters.get("resume"))  # the clock then continues from the earlier run
    if wall is not None and seconds is not None and not is_resumed and wall > seconds + SHORT_SECONDS:
        yield f"the task took {wall:.6g} s, longer than the run ({seconds:.6g} s)"


def _check_clocks(evidence: Evidence, reported: ReportedFacts) -> Iterator[str]:
    """Compare rank 0's two clocks, which its metrics have side by side, over the whole run."""
    if not evidence.spec.runs_task_program or evidence.rules is None or evidence.rules.origin is not None:
        return  # the seconds of another program may be of any clock
    attempts = (evidence.faults or {}).get("attempts")
    if 0 not in reported.logs or (isinstance(attempts, list) and len(attempts) > 1):
        return  # the seconds of a restarted run begin again at its checkpoint
    first, last = reported.logs[0].first_reading, reported.logs[0].last_reading
    if first is None or last is None:
        return
    wall, seconds = last[0] - first[0], last[1] - first[1]
    if abs(wall - seconds) > CLOCK_SLACK_SECONDS + SHARE * max(abs(wall), abs(seconds)):
        yield f"{wall:.6g} s passed between two metrics of rank 0 by their times, and {seconds:.6g} s by their seconds"


def _check_event_times(evidence: Evidence, reported: ReportedFacts, samples: SampleWatch) -> Iterator[str]:
    workers = {worker.rank: worker for worker in evidence.observation.workers}
    for rank, facts in reported.logs.items():
        worker = workers.get(rank)
        # A command may report its history when it has ended, one metric after the other.
        if facts.backward > SLACK_SECONDS and evidence.spec.task != CUSTOM:
            yield f"the events of rank {rank} go back in time by {facts.backward:.6g} s"
        if worker is None or facts.first is None or facts.last is None:
            continue
        if worker.started is not None and facts.first < worker.started - SLACK_SECONDS:
            yield f"rank {rank} reported {worker.started - facts.first:.6g} s before it started"
        if worker.finished is not None and facts.last > worker.finished + SLACK_SECONDS:
            yield f"rank {rank} reported {facts.last - worker.finished:.6g} s after it ended"
    started, finished = evidence.span
    # Of several machines each has a clock of its own.
    if started is None or evidence.spec.engine != "local" or not _have_all_ended(evidence.observation):
        return
    if samples.first is not None and samples.first < started - SLACK_SECONDS:
        yield "resources were sampled before the run"
    if samples.last is not None and samples.last > finished + END_SECONDS:
        yield "resources were sampled after the run"


def _check_worker_times(evidence: Evidence) -> Iterator[str]:
    for worker in evidence.observation.workers:
        if worker.started is not None and worker.finished is not None and worker.finished < worker.started - 1:
            yield f"worker {worker.rank} ended before it started"
    started, _ = evidence.span
    recorded = parse_timestamp(evidence.created)
    if started is not None and evidence.spec.engine == "local" and started < recorded - RECORD_SLACK_SECONDS:
        yield f"the run started {recorded - started:.6g} s before it was recorded"


def _check_ranks(evidence: Evidence, is_success: bool) -> Iterator[str]:
    spec = evidence.spec
    ranks = [worker.rank for worker in evidence.observation.workers]
    firsts = [spec.ranks_of(unit)[0] for unit in range(spec.unit_count)]
    if len({*ranks}) < len(ranks):
        yield "a rank appears twice"
    elif (
        ranks
        and sorted(ranks) not in (list(range(spec.process_count)), firsts)
        and (is_success or max(ranks) >= spec.process_count)
    ):
        yield f"the {len(ranks)} observed workers are not those of the run"
    nodes = {worker.node for worker in evidence.observation.workers if worker.node is not None}
    if spec.engine == "local" and len(nodes) > 1:
        yield f"a run on one machine used {len(nodes)} machines"


def _check_logs(evidence: Evidence, reported: ReportedFacts, samples: SampleWatch, is_success: bool) -> Iterator[str]:
    spec = evidence.spec
    beyond = [rank for rank in reported.logs if rank >= spec.process_count]
    if beyond:
        yield f"there is a log of rank {beyond[0]}, but the run has no such rank"
    if spec.engine not in _OWN_LOGS:
        return
    for worker in evidence.observation.workers:
        is_expected = is_success and worker.phase != Phase.LOST  # such a run went on without this rank's machine
        if worker.started is not None and worker.rank not in reported.logs and is_expected:
            yield f"rank {worker.rank} has no log"
    for rank, facts in reported.logs.items():
        if facts.foreign and facts.first is None:
            yield f"the log of rank {rank} contains only events of other ranks"
    for rank, size in sorted(samples.log_bytes.items()):
        found = reported.logs[rank].counts.bytes if rank in reported.logs else 0
        if found < size:
            yield f"the log of rank {rank} has {found} bytes, but had {size} during the run"
    has_measured = evidence.observation.seconds is not None
    if has_measured and is_success and samples.machines == 0:
        yield "there are no samples of the machine"


def _check_settings(
    evidence: Evidence, reported: ReportedFacts, samples: SampleWatch, is_success: bool
) -> Iterator[str]:
    spec = evidence.spec
    local = {spec.engine == LOCAL.provider, spec.cluster == LOCAL.name}
    if spec.cluster_kind is not None:
        local.add(spec.cluster_kind == LOCAL.provider)
    if len(local) > 1:
        yield f"the engine {one_line(spec.engine, 40)} does not fit the cluster {one_line(spec.cluster, 40)}"
    if (_SHARED if not spec.share_machine else _HELD) in samples.locks:
        yield f"the run was {'' if spec.share_machine else 'not '}to share its machine, and did the opposite"
    if spec.engine == LOCAL.provider and spec.image is not None:
        yield "a run of this machine's processes has an image"
    if spec.engine == LOCAL.provider and spec.has_shaped_network and is_success and evidence.shaping is None:
        yield f"the network was to be {one_line(str(spec.network), 40)}, and nothing was recorded of shaping it"
    if is_finite_number(hour := spec.price.get("per_hour")) and hour < 0:
        yield f"the price is {hour:g} per hour"
    for rank, facts in reported.environments.items():
        given = {"world_size": spec.world_size, "backend": spec.backend, "seed": spec.seed, "method": dict(spec.method)}
        for name, asked in given.items():
            if spec.runs_task_program and name in facts and facts[name] != asked:
                yield f"rank {rank} reported {name} {one_line(str(facts[name]), 40)}, but the run has {asked}"
        threads = None if spec.cpus is None else max(1, int(spec.cpus) // spec.processes_per_worker)
        if spec.runs_task_program and None not in (threads, facts.get("threads")) and facts["threads"] != threads:
            yield f"rank {rank} reported {one_line(str(facts['threads']), 40)} threads, but the run gives it {threads}"
        device = facts.get("device")
        if spec.runs_task_program and isinstance(device, str) and device.startswith("cpu") != (spec.device == "cpu"):
            yield f"rank {rank} reported device {one_line(device, 40)}, but the run has {spec.device}"
    options = ((reported.result or {}).get("details") or {}).get("options")
    if not spec.runs_task_program or not isinstance(options, Mapping):
        return
    for name, asked in spec.parameters.items():
        if name in options and name not in _AS_USED and asked != "auto" and options[name] != asked:
            yield f"the task used {name} {one_line(str(options[name]), 40)}, but the run has {one_line(str(asked), 40)}"


def _check_figures(reported: ReportedFacts) -> Iterator[str]:
    """Compare the result with the task's record of the moment it reached its goal."""
    facts = reported.result or {}
    goal, goals = facts.get("goal"), (facts.get("details") or {}).get("goals")
    if facts.get("outcome") != Outcome.GOAL_REACHED or not goal or not isinstance(goals, Mapping):
        return
    passed = goals.get(goal["kind"])
    if not isinstance(passed, Mapping):
        return
    claimed = {name: facts[name] for name in ("wall_seconds", "training_seconds", "updates", "samples")}
    for name, value in {**claimed, "epoch": facts["epochs"], "value": goal["value"]}.items():
        noted = passed.get(name)
        if is_finite_number(value) and is_finite_number(noted) and not math.isclose(value, noted, rel_tol=1e-6):
            yield f"{name} is {value:.6g}, but was {noted:.6g} at the goal"
    details = facts.get("details") or {}
    options = details.get("options")
    used = options.get("precision") if isinstance(options, Mapping) else None
    if used is not None and "precision" in details and details["precision"] != used:
        yield f"the precision is {one_line(str(details['precision']), 40)} and {one_line(str(used), 40)}"


def _check_provenance(evidence: Evidence, reported: ReportedFacts) -> Iterator[str]:
    if evidence.spec.engine != "local":
        return
    machine = evidence.provenance.get("machine")
    cpu = machine.get("cpu") if isinstance(machine, Mapping) else None
    architecture = machine.get("architecture") if isinstance(machine, Mapping) else None
    for rank, facts in reported.environments.items():
        name = facts.get("device_name")
        is_named = evidence.spec.runs_task_program and evidence.spec.device == "cpu" and name and architecture
        if is_named and name != architecture:
            yield f"rank {rank} ran on {one_line(str(name), 60)}, but was started on {one_line(str(architecture), 60)}"
        if evidence.spec.runs_task_program and cpu and facts.get("cpu") and facts["cpu"] != cpu:
            yield f"rank {rank} ran on {one_line(str(facts['cpu']), 60)}, but was started on {one_line(str(cpu), 60)}"


def _have_all_ended(observation: Observation) -> bool:
    return all(worker.finished is not None for worker in observation.workers if worker.started is not None)
