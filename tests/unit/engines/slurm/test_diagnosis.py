"""What Slurm says of a job, in words and as an ending."""

import pytest

from mlbench_cli.engines.slurm import diagnosis
from mlbench_cli.engines.slurm.controller import JobReport
from mlbench_cli.model.run import Ending


def job(state: str, reason: str = "") -> JobReport:
    return JobReport("27", state, reason, "n[1-3]")


@pytest.mark.parametrize(
    ("reason", "permanent", "word"),
    [
        ("Priority", False, "priority"),
        ("Resources", False, "free"),
        ("PartitionConfig", True, "more nodes or time"),
        ("PartitionTimeLimit", True, "--timeout"),
        ("BadConstraints", True, "sinfo"),
        ("ReqNodeNotAvail, UnavailableNodes:n2", False, "sinfo -R"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", False, "-R"),
        ("QOSMaxJobsPerUserLimit", False, "QOS"),
        ("QOSMaxNodePerJob", True, "ask for less"),
        ("QOSMaxWallDurationPerJobLimit", True, "ask for less"),
        ("AssocGrpCpuLimit", False, "account"),
        ("QOSGrpGRESMinutes", False, "it is waiting"),
        ("QOSMaxCpuMinutesPerJobLimit", True, "ask for less"),
        ("MaxBillingPerAccount", False, "it is waiting"),
        ("MaxMemPerLimit", True, "ask for less"),
        ("AssocMaxWallDurationPerJobLimit", True, "account"),
        ("InvalidAccount", True, "account"),
        ("JobHeldUser", False, "scontrol release"),
        ("DependencyNeverSatisfied", True, "failed"),
        ("BeginTime", False, "in the future"),
        ("None", False, "not considered"),
        ("PartitionDown", False, "partition is down"),
        ("JobHoldMaxRequeue", True, "too often"),
        ("ReservationDeleted", True, "deleted"),
        ("SomethingOfNextYear", False, "scontrol show job 27"),
    ],
)
def test_a_pending_reason_comes_with_a_hint(reason: str, permanent: bool, word: str) -> None:
    finding = diagnosis.explain_pending(job("PENDING", reason))
    assert reason in finding.summary
    assert (finding.permanent, finding.retryable) == (permanent, not permanent)
    assert finding.code == ("unschedulable" if permanent else "pending")
    assert word in (finding.hint or "")


@pytest.mark.parametrize(
    ("state", "reason", "begun", "ended", "code"),
    [
        ("TIMEOUT", "TimeLimit", True, Ending.DEADLINE, "time_limit"),
        ("DEADLINE", "", True, Ending.DEADLINE, "time_limit"),
        ("OUT_OF_MEMORY", "", True, Ending.FAILED, "out_of_memory"),
        ("NODE_FAIL", "NodeDown", True, Ending.LOST, "node_failed"),
        ("BOOT_FAIL", "", False, Ending.NEVER_STARTED, "node_failed"),
        ("PREEMPTED", "", True, Ending.LOST, "preempted"),
        ("CANCELLED", "", True, Ending.CANCELED, "canceled_by_other"),
        ("FAILED", "JobLaunchFailure", False, Ending.NEVER_STARTED, "output_unwritable"),
        ("FAILED", "RaisedSignal:53(Real-time_signal_19)", False, Ending.NEVER_STARTED, "output_unwritable"),
        ("FAILED", "BadConstraints", False, Ending.NEVER_STARTED, "impossible_request"),
        ("FAILED", "NonZeroExitCode", False, Ending.NEVER_STARTED, "not_started"),
        ("COMPLETED", "None", False, Ending.NEVER_STARTED, "not_started"),
        ("COMPLETED", "None", True, Ending.LOST, "evidence_missing"),
    ],
)
def test_an_end_that_no_rank_wrote_down_is_never_a_success(
    state: str, reason: str, begun: bool, ended: Ending, code: str
) -> None:
    found, finding = diagnosis.explain_end(job(state, reason), is_begun=begun, is_canceled=False)
    assert found is ended
    assert finding is not None
    assert (finding.code, finding.retryable) == (code, state != "FAILED")


def test_nodes_that_are_powered_up_are_what_a_job_waits_for() -> None:
    finding = diagnosis.explain_pending(job("CONFIGURING", "None"))
    assert "powered up" in str(finding.hint)
    assert diagnosis.is_worth_telling(job("CONFIGURING", "None"))


def test_our_own_cancellation_needs_no_finding() -> None:
    assert diagnosis.explain_end(job("CANCELLED"), is_begun=True, is_canceled=True) == (Ending.CANCELED, None)


def test_a_job_that_slurm_forgot_runs_on_while_its_ranks_show_life() -> None:
    ended, finding = diagnosis.forgotten("27", is_begun=True, shows_life=True)
    assert ended is None
    assert finding.code == "controller_forgot"
    assert diagnosis.forgotten("27", is_begun=True, shows_life=False)[0] is Ending.LOST
    assert diagnosis.forgotten("27", is_begun=False, shows_life=False)[0] is Ending.NEVER_STARTED


@pytest.mark.parametrize(
    "line",
    [
        # The first two were recorded with Slurm 22.05, the others are from its source.
        "slurmstepd-n3: error: StepId=2.0 exceeded memory limit (556113920 > 419430400), being killed",
        "slurmstepd-n3: error: Exceeded job memory limit",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0 cgroup.",
        "slurmstepd: error: Detected 3 oom_kill events in StepId=9.batch.",
        "[2026-02-24T23:34:12.229] error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been",
    ],
)
def test_a_step_killed_for_its_memory_is_found_in_its_log(line: str) -> None:
    found = diagnosis.find_memory_kill(f"a rank says something\n{line}\nslurmstepd: error: *** STEP ***\n", "2")
    assert found is not None
    assert found.code == "out_of_memory"
    assert diagnosis.find_memory_kill(f"rank 0: {line}", "2") is None
    assert diagnosis.find_memory_kill("slurmstepd-n1: error: *** STEP 2.0 ON n3 CANCELLED AT ***", "2") is None


@pytest.mark.parametrize(
    ("reason", "is_told"),
    [
        ("", False),
        ("None", False),
        ("Priority", False),
        ("Resources", False),
        ("Resources, x", False),
        ("QOSLimit", True),
    ],
)
def test_an_ordinary_wait_for_nodes_is_not_worth_telling(reason: str, is_told: bool) -> None:
    assert diagnosis.is_worth_telling(job("PENDING", reason)) is is_told
