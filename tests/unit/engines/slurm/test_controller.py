"""What Slurm's commands answer, as recorded from 22.05, and what is made of it."""

import pytest

from mlbench_cli.engines.slurm import controller
from mlbench_cli.engines.slurm.controller import Answer, JobReport
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UnreachableError, UsageError
from tests.unit.engines.slurm.login import Login


def test_jobs_are_read_from_the_format_of_our_own() -> None:
    text = (
        "27|FAILED|1795308552|1795308565|n[1-3]|NonZeroExitCode\n"
        "28|PENDING|N/A|N/A||Nodes required for job are DOWN, DRAINED or reserved\n"
        "47_[0-999]|PENDING|N/A|N/A||Priority\n"
        "slurm_load_jobs error: Invalid job id specified\n"
    )
    jobs = controller.parse_jobs(text)
    assert jobs == {
        "27": JobReport("27", "FAILED", "NonZeroExitCode", "n[1-3]", 1795308552.0, 1795308565.0),
        "28": JobReport("28", "PENDING", "Nodes required for job are DOWN, DRAINED or reserved"),
    }


def test_a_state_of_accounting_loses_who_cancelled() -> None:
    text = "51|CANCELLED by 1000|1795308551|1795308560|n1|None\n51.batch|CANCELLED|||n1|\n"
    assert controller.parse_jobs(text)["51"].state == "CANCELLED"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:00", 60), ("30:00", 1800), ("1-00:00:00", 86400), ("2-12:30:15", 217815), ("infinite", None), ("n/a", None)],
)
def test_limits_are_read_in_all_of_slurms_forms(text: str, seconds: int | None) -> None:
    assert controller.parse_limit(text) == seconds


def test_partitions_add_up_their_kinds_of_nodes() -> None:
    text = "gpu|1-00:00:00|4|gpu:a100:4(S:0-1)|gpu*\ngpu|1-00:00:00|2|gpu:8|gpu*\ncpu|infinite|3|(null)|cpu\n"
    partitions = controller.parse_partitions(text)
    assert partitions["gpu"] == {"max_seconds": 86400, "nodes": 6, "gpus_per_node": 8, "default": True}
    assert partitions["cpu"] == {"max_seconds": None, "nodes": 3, "gpus_per_node": 0, "default": False}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: ", UsageError),
        ("sbatch: error: Invalid account or account/partition combination specified", CredentialError),
        ("sbatch: error: Invalid qos specification", CredentialError),
        ("allocation failure: Requested node configuration is not available", CapacityError),
        ("sbatch: error: Invalid generic resource (gres) specification", CapacityError),
        ("sbatch: error: Memory specification can not be satisfied", CapacityError),
        ("sbatch: error: Invalid feature specification", CapacityError),
        ("sbatch: error: Invalid --time specification", UsageError),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", UnreachableError),
        ("sbatch: error: Socket timed out on send/recv operation", UnreachableError),
    ],
)
def test_a_refusal_becomes_an_error_with_the_next_command(text: str, kind: type[MlbenchError]) -> None:
    error = controller.explain_refusal(Answer(1, "", text))
    assert type(error) is kind
    assert error.hint


def test_versions_are_compared_by_year_and_month() -> None:
    assert controller.parse_version("slurm-wlm 22.05.8") == (22, 5)
    assert controller.parse_version("slurm 20.11.9") == (20, 11)
    assert controller.parse_version("") is None


def test_configuration_keeps_values_with_blanks() -> None:
    text = "Configuration data as of 2026\nKillWait                = 5 sec\nMinJobAge               = 300 sec\n"
    assert controller.parse_config(text)["KillWait"] == "5 sec"


# --- commands --------------------------------------------------------------------------------------------------------


def test_a_command_has_a_limit_and_the_call_that_asks_for_it_a_longer_one() -> None:
    login = Login(("squeue", Answer(1, "out", "err")))
    assert controller.ask(login.channel, ["squeue", "-x"], seconds=10.0) == Answer(1, "out", "err")
    assert login.commands == [["squeue", "-x"]]
    assert login.waits == [(10.0, 30.0)]


def test_all_jobs_of_the_user_are_listed_with_one_command() -> None:
    login = Login(("squeue", Answer(0, "27|RUNNING|100|N/A|n1|None\n", "")))
    assert controller.list_jobs(login.channel) == {"27": JobReport("27", "RUNNING", "None", "n1", 100.0, None)}
    assert login.commands == [["squeue", "-h", "--me", "-t", "all", "-o", "%i|%T|%S|%e|%N|%r"]]


@pytest.mark.parametrize(
    ("err", "reason"),
    [("", "no reason given"), ("x\nslurm_load_jobs error: Timeout\n", "slurm_load_jobs error: Timeout")],
)
def test_a_controller_that_does_not_answer_is_quoted(err: str, reason: str) -> None:
    login = Login(("squeue", Answer(1, "", err)), ("scancel", Answer(1, "", err)))
    for ask in (
        lambda: controller.list_jobs(login.channel),
        lambda: controller.find_jobs(login.channel, "a", "b"),
        lambda: controller.cancel_job(login.channel, "27"),
    ):
        with pytest.raises(UnreachableError) as caught:
            ask()
        assert caught.value.message == f"Slurm's controller is not responding: {reason}"


def test_jobs_of_a_run_are_found_by_name_and_comment() -> None:
    text = "9|PENDING|None|mine\n30|RUNNING|None|mine\n8|RUNNING|None|other\nx|RUNNING|None|mine\n7|FAILED|None|mine\n"
    login = Login(("squeue", Answer(0, f"{text}6|FAILED|BadConstraints|mine\n5\n", "")))
    assert controller.find_jobs(login.channel, "job", "mine") == ["7", "9", "30"]
    assert login.commands[0][-4:] == ["-n", "job", "-o", "%i|%T|%r|%k"]


def test_the_accounting_database_knows_jobs_that_the_controller_forgot() -> None:
    line = "27|CANCELLED by 1000|2027|1800000000|n1|None\n"
    login = Login(("sacct", Answer(0, line, "")))
    assert controller.ask_accounting(login.channel, "27") == JobReport("27", "CANCELLED", "None", "n1", 2027.0, 1.8e9)
    assert controller.ask_accounting(login.channel, "28") is None
    assert controller.ask_accounting(Login(("sacct", Answer(1, line, ""))).channel, "27") is None


def test_cancelling_a_job_that_has_ended_is_no_error() -> None:
    login = Login(("scancel", Answer(1, "", "scancel: error: Invalid job id specified")))
    controller.cancel_job(login.channel, "27")
    assert login.commands == [["scancel", "27"]]


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "ended", "pending"),
    [
        *(
            (state, True, False)
            for state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        ),
        *((state, True, False) for state in ("BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "PREEMPTED", "REVOKED")),
        *((state, False, True) for state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING")),
        *((state, False, True) for state in ("RESV_DEL_HOLD", "SPECIAL_EXIT")),
        *((state, False, False) for state in ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT")),
    ],
)
def test_states_of_slurms_manual(state: str, ended: bool, pending: bool) -> None:
    job = JobReport("1", state)
    assert (job.has_ended, job.is_pending) == (ended, pending)


@pytest.mark.parametrize(
    ("line", "report"),
    [
        ("27|CANCELLED+|1.5|x|n1| why \n", JobReport("27", "CANCELLED", "why", "n1", 1.5, None)),
        ("27|RUNNING|1|2|n1|a|b\n", JobReport("27", "RUNNING", "a|b", "n1", 1.0, 2.0)),
        ("27|A|1|2|n1|x\n27|B|1|2|n1|x\n", JobReport("27", "B", "x", "n1", 1.0, 2.0)),
        ("27||1|2|n1|x\n", None),
        ("27|A|1|2|n1\n", None),
    ],
)
def test_lines_of_jobs(line: str, report: JobReport | None) -> None:
    assert controller.parse_jobs(line) == ({} if report is None else {"27": report})


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid",
            UsageError,
            "Slurm rejects the time limit: Requested time limit is invalid",
        ),
        (
            "sbatch: error: invalid\n partition specified: x",
            UsageError,
            "Slurm does not know the partition: invalid partition specified: x",
        ),
        ("sbatch: error: Invalid node name specified", CapacityError, "Slurm cannot provide what the run requests"),
        ("something new", UsageError, "Slurm rejects the job: something new"),
    ],
)
def test_a_refusal_is_quoted_without_slurms_preamble(text: str, kind: type[MlbenchError], message: str) -> None:
    error = controller.explain_refusal(Answer(1, "", text))
    assert type(error) is kind
    assert error.message.startswith(message)


def test_a_command_without_an_answer_is_no_refusal() -> None:
    assert isinstance(controller.explain_refusal(Answer(None, "", "invalid partition")), UnreachableError)


@pytest.mark.parametrize(
    "text", ["", "gpu|infinite|3|(null)\n", "gpu|infinite|x|(null)|gpu\n", "gpu|infinite|3|(null)|gpu|more\n"]
)
def test_lines_that_describe_no_partition_are_skipped(text: str) -> None:
    assert controller.parse_partitions(text) == {}


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("gpu:4", 4), ("gpu:a100:2,gpu:v100:3", 5), ("gpu:a100:8(S:0-1),nic:2", 8), ("nic:2", 0), ("(null)", 0)],
)
def test_gpus_of_a_node_in_slurms_words(gres: str, gpus: int) -> None:
    assert controller.parse_partitions(f"p|infinite|1|{gres}|p\n")["p"]["gpus_per_node"] == gpus
