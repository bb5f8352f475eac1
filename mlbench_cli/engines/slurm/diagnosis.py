"""From Slurm's view of a job to its ending and findings. Pure, tested on recorded answers. Files of the ranks take
precedence.
"""

import re
from collections.abc import Mapping

from mlbench_cli.engines.slurm.controller import JobReport
from mlbench_cli.model.run import Ending, Finding

# First word of a pending job's reason -> (hint, whether waiting longer cannot help).
_REASONS: Mapping[str, tuple[str, bool]] = {
    "CONFIGURING": ("Its nodes are powered up or rebooted, which takes minutes in a cloud: sinfo.", False),
    "None": ("Slurm has not considered it yet.", False),
    "Priority": ("Jobs with a higher priority are ahead of it: squeue --start, sprio.", False),
    "Resources": ("It is waiting for free nodes: sinfo.", False),
    "PartitionConfig": ("It requests more nodes or time than the partition has: sinfo -o '%P %D %l'.", True),
    "BadConstraints": ("No node has what it requests: sinfo -N -o '%N %f %G'.", True),
    "PartitionTimeLimit": ("Its time limit exceeds the partition's: use a shorter --timeout.", True),
    "PartitionNodeLimit": ("It requests more nodes than the partition allows per job: use fewer workers.", True),
    "PartitionDown": ("The partition is down: ask its administrators, or attach another one.", False),
    "PartitionInactive": ("The partition is inactive: ask its administrators, or attach another one.", False),
    "JobHeldUser": ("It is held: scontrol release ID.", False),
    "JobHeldAdmin": ("An administrator holds it: ask them.", False),
    "JobHoldMaxRequeue": ("It failed to start too often: ask the administrators for the node's log.", True),
    "BeginTime": ("Its start time is in the future; after a node failure, Slurm has requeued it.", False),
    "Dependency": ("It is waiting for another job.", False),
    "DependencyNeverSatisfied": ("The job that it waits for has failed.", True),
    "InvalidAccount": ("Attach with an account that you may use: sacctmgr show assoc user=$USER.", True),
    "InvalidQOS": ("Attach with a QOS that you may use: sacctmgr show assoc user=$USER.", True),
    "AccountNotAllowed": ("The partition rejects this account: attach with another --account or --partition.", True),
    "QOSNotAllowed": ("The partition rejects this QOS: attach with another --qos or --partition.", True),
    "Licenses": ("It is waiting for a license.", False),
    "Reservation": ("It is waiting for its reservation.", False),
    "ReservationDeleted": ("Its reservation was deleted.", True),
    "NodeDown": ("A node that it needs is down: sinfo -R.", False),
    "ReqNodeNotAvail": ("A node that it needs is down, drained or reserved: sinfo -R.", False),
    "Nodes": ("Nodes that it needs are down, drained or reserved: sinfo -R.", False),
}
# In names of limits: on one job, which waiting does not change. "Minutes" are an account's, and come back.
_JOB_LIMIT = re.compile(r"PerJob|PerNode|PerLimit|Min(?!utes)")
_MEMORY_KILL = re.compile(
    r"^(?:slurmstepd\S*:|\[[\dT:.-]+\]) error: ((?:StepId=\S+ |Step |Job )?exceeded (?:job |step )?memory limit[^\n]*|"
    r"Exceeded job memory limit[^\n]*|Detected \d+ oom[-_]kill event[^\n]*)",
    re.MULTILINE | re.IGNORECASE,
)
_SOON = ("None", "Priority", "Resources")


def explain_pending(job: JobReport) -> Finding:
    """Why a job is pending, in words."""
    reason = job.waits_for
    if "requeued held" in reason:
        hint, permanent = f"Its nodes could not start it: scontrol release {job.id}, or mlbench cancel NAME.", True
        return _pending(job, reason, hint, permanent)
    first = reason.replace("(", "").split(",")[0].split(" ")[0]
    hint, permanent = _REASONS.get(first, ("", False))
    if not hint and first.startswith(("QOS", "Assoc", "Max")):
        permanent = _JOB_LIMIT.search(first) is not None
        whose = "of its QOS" if first.startswith("QOS") else "of its account"
        hint = f"A limit {whose} is reached: " + (
            "it never starts: ask for less, or attach another one."
            if permanent
            else "it is waiting, or attach another one."
        )
    return _pending(
        job, reason, hint or "Slurm's own word for the reason: squeue --start; scontrol show job " + job.id, permanent
    )


def _pending(job: JobReport, reason: str, hint: str, permanent: bool) -> Finding:
    code = "unschedulable" if permanent else "pending"
    return Finding(
        code,
        f"Slurm's job {job.id} is pending: {reason}.",
        hint=hint,
        permanent=permanent,
        retryable=not permanent,
        evidence={"job": job.id, "state": job.state, "reason": reason},
    )


def is_worth_telling(job: JobReport) -> bool:
    """Whether the reason is more than an ordinary wait for free nodes."""
    return job.waits_for.split(",")[0].split(" ")[0] not in _SOON


def explain_end(job: JobReport, *, is_begun: bool, is_canceled: bool) -> tuple[Ending, Finding | None]:
    """How a run ended whose agents have not written so, from Slurm's state of its job.

    `is_begun` says whether an agent has written anything, `is_canceled` whether mlbench was asked to cancel.
    COMPLETED is never a success here: evidence of the ranks is missing.
    """
    state, facts = job.state, {"job": job.id, "state": job.state, "reason": job.reason, "nodes": job.nodes}
    ended, code, summary, hint = _decide(job, is_begun)
    if state == "CANCELLED" and is_canceled:
        return Ending.CANCELED, None
    return ended, Finding(code, summary, hint=hint, retryable=state != "FAILED", evidence=facts)


def _decide(job: JobReport, is_begun: bool) -> tuple[Ending, str, str, str]:
    number, nodes = job.id, job.nodes or "its nodes"
    again = "Run it again."
    if job.state in ("TIMEOUT", "DEADLINE"):
        return (
            Ending.DEADLINE,
            "time_limit",
            f"Slurm ended the job {number} at its time limit ({job.state}).",
            "Use a longer --timeout (mlbench certify: --budget), or attach a partition with a longer limit.",
        )
    if job.state == "OUT_OF_MEMORY":
        return (
            Ending.FAILED,
            "out_of_memory",
            f"Slurm ended the job {number}: it used more memory than allocated.",
            "Use smaller batches, or more nodes.",
        )
    if job.state in ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED"):
        ended = Ending.LOST if is_begun else Ending.NEVER_STARTED
        return ended, "node_failed", f"A node of the job {number} failed ({job.state}, {nodes}).", f"sinfo -R. {again}"
    if job.state in ("PREEMPTED", "REVOKED"):
        return Ending.LOST, "preempted", f"The job {number} was preempted by another job ({job.state}).", again
    if job.state == "CANCELLED":
        summary = f"The job {number} was canceled by someone else."
        return (Ending.CANCELED if is_begun else Ending.NEVER_STARTED), "canceled_by_other", summary, again
    if job.state == "FAILED" and not is_begun:
        if job.reason.startswith(("JobLaunchFailure", "RaisedSignal:53")):  # slurmstepd's own signal
            summary = f"Slurm could not start the job {number} on {nodes}; often its folder is not writable there."
            return Ending.NEVER_STARTED, "output_unwritable", summary, "Check that the shared folder is mounted there."
        if job.reason == "BadConstraints":
            summary = f"Slurm refused the job {number}: no node has what it requests."
            return Ending.NEVER_STARTED, "impossible_request", summary, "sinfo -N -l"
        summary = f"The job {number} failed before an agent could start ({job.reason})."
        return (
            Ending.NEVER_STARTED,
            "not_started",
            summary,
            "Its batch.log and step.log are in the folder manifests of the archive.",
        )
    if not is_begun:
        summary = f"The job {number} ended ({job.state}), but the run did not start."
        return (
            Ending.NEVER_STARTED,
            "not_started",
            summary,
            "Check that all nodes share the folder: mlbench doctor slurm",
        )
    summary = f"The job {number} ended ({job.state}), but the files of its ranks are missing."
    return Ending.LOST, "evidence_missing", summary, again


def setup_failed(text: str) -> Finding:
    """The finding of a job in which a line of --setup failed, from what its script noted."""
    return Finding(
        "setup_failed",
        f"A line of --setup failed, so no rank was started: {text[:300]}.",
        hint="Correct the lines: mlbench attach-slurm NAME --setup FILE; the run's batch.log has their output.",
        evidence={"failed": text[:300]},
    )


def find_memory_kill(log: str, number: str) -> Finding | None:
    """The finding of a job whose step Slurm killed for its memory, from what slurmstepd writes into the step's log.

    With JobAcctGatherParams=OverMemoryKill such a job ends as COMPLETED or FAILED; with cgroups often as OUT_OF_MEMORY.
    """
    found = _MEMORY_KILL.search(log)
    if found is None:
        return None
    return Finding(
        "out_of_memory",
        f"Slurm killed the job {number} because of its memory: {found[1].strip()[:200]}.",
        hint="Use smaller batches, or more nodes.",
        evidence={"job": number, "log": [found[0][:300]]},
    )


def forgotten(number: str, *, is_begun: bool, shows_life: bool) -> tuple[Ending | None, Finding]:
    """The finding for a job that the controller does not know (anymore)."""
    if shows_life:
        summary = f"Slurm no longer knows the job {number}, but its ranks are still running."
        return None, Finding("controller_forgot", summary, hint="mlbench cancel NAME ends them.", retryable=True)
    ended = Ending.LOST if is_begun else Ending.NEVER_STARTED
    summary = f"Slurm no longer knows the job {number}, and its ranks " + (
        "have ended without a trace." if is_begun else "never began."
    )
    return ended, Finding("job_vanished", summary, hint="Run it again.", retryable=True)
