"""What Slurm's commands answer, as recorded from 22.05, and what is made of it."""

from typing import cast

import pytest

from mlbench_cli.agent.channel import Channel
from mlbench_cli.engines.slurm import controller
from mlbench_cli.engines.slurm.controller import Answer, JobReport
from mlbench_cli.errors import CapacityError, CredentialError, MlbenchError, UnreachableError, UsageError


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


def test_a_state_of_accounting_loses_who_canceled() -> None:
    text = "51|CANCELLED by 1000|1795308551|1795308560|n1|None\n51.batch|CANCELLED|||n1|\n"
    assert controller.parse_jobs(text)["51"].state == "CANCELLED"
    assert controller.parse_jobs(text.replace("CANCELLED by 1000", "CANCELLED+"))["51"].state == "CANCELLED"


def test_jobs_of_other_data_folders_with_the_same_name_are_others() -> None:
    class Login:
        def call(self, name: str, **options: object) -> dict[str, object]:
            out = (
                "7|RUNNING|None|theirs\n9|FAILED|BadConstraints|ours\n12|PENDING|Priority|ours\n11|RUNNING|None|ours\n"
            )
            return {"code": 0, "out": out, "err": ""}

    assert controller.find_jobs(cast(Channel, Login()), "x-2", "ours") == ["11", "12"]


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
    assert (
        controller.parse_partitions("a|infinite|2|gpu:a100:no_consume:4(S:0-1),gpu:1g.10gb:7,nvme:1|a\n")["a"][
            "gpus_per_node"
        ]
        == 11
    )
    assert controller.parse_partitions("v|infinite|2|vgpu:grid:8,mps:800|v\n")["v"]["gpus_per_node"] == 0
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
        ("sbatch: error: Batch job submission failed: Rate limit exceeded, please retry later", UnreachableError),
        (
            "sbatch: error: Batch job submission failed: Incompatible versions of client and server code",
            UnreachableError,
        ),
        ("sbatch: error: Batch job submission failed: No partition specified or system default partition", UsageError),
        # A site's plug-in says what it likes; Slurm's verdict counts.
        (
            "sbatch: NOTE: access denied to /old since 2025\nsbatch: error: Batch job submission failed: Requested "
            "node configuration is not available",
            CapacityError,
        ),
        (
            "sbatch: error: Please specify a valid project account (-A).\nsbatch: error: Batch job submission failed: "
            "Unspecified error",
            CredentialError,
        ),
        (
            "srun: error: Unable to allocate resources: Invalid account or account/partition combination specified",
            CredentialError,
        ),
    ],
)
def test_a_refusal_becomes_an_error_with_the_next_command(text: str, kind: type[MlbenchError]) -> None:
    error = controller.explain_refusal(Answer(1, "", text))
    assert type(error) is kind
    assert error.hint


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("519605\n", "519605"),
        ("--> Verifying valid submit host ...OK\n519605;cluster1\n", "519605"),
        ("12\nYour job will be charged 3 hours\n", "12"),
        ("Submitted batch job 12 on cluster b\n", "12"),  # of a wrapper that drops --parsable
        ("2 checks passed\n", None),
        ("", None),
    ],
)
def test_the_number_of_a_job_is_found_among_the_lines_of_a_site(text: str, number: str | None) -> None:
    assert controller.find_number(text) == number


def test_odd_lines_of_slurm_are_skipped() -> None:
    lines = "7| |1|2|n1|None\n\u00b2|RUNNING|1|2|n1|None\n8|RUNNING|1|N/A|n1|None\n"
    assert controller.parse_jobs(lines).keys() == {"8"}
    assert controller.parse_partitions("all|infinite|\u00b2|(null)|all*\n") == {}


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
