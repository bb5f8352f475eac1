"""Facts about a Slurm cluster: what its commands answer, what is refused, and what nodes say of themselves."""

from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.engines.machines.details import PartitionRecord, SlurmDetails
from mlbench_cli.engines.slurm.controller import Answer
from mlbench_cli.engines.slurm.discovery import (
    NodeProbe,
    SlurmFacts,
    check_choice,
    check_probes,
    discover_cluster,
    free_nodes,
    parse_associations,
    parse_probes,
    probe_nodes,
)
from mlbench_cli.errors import CapacityError, MlbenchError, NotFoundError, UnreachableError, UsageError
from tests.unit.engines.slurm.login import Login

VERSION = ("sinfo --version", Answer(0, "slurm 23.11.4\n", ""))
CONFIG = "KillWait = 5 sec\nMinJobAge = 120 sec\nAccountingStorageType = accounting_storage/slurmdbd\n"


def part(default: bool = True) -> PartitionRecord:
    return PartitionRecord(max_seconds=None, nodes=2, gpus_per_node=0, default=default)


FACTS = SlurmFacts("23.11.4", {"cpu": part(), "gpu": part(False)}, 30, 300, False, None, {})
DETAILS = SlurmDetails(folder="/shared", python="/opt/python")

# --- discovery -------------------------------------------------------------------------------------------------------


def test_a_cluster_is_described_by_its_own_commands() -> None:
    login = Login(
        VERSION,
        ("scontrol config", Answer(0, CONFIG, "")),
        ("sinfo %R|%l|%D|%G|%P", Answer(0, "gpu|1-00:00:00|4|gpu:a100:8|gpu*\n", "")),
        ("srun --help", Answer(0, "  --container-image=NAME", "")),
    )
    assert discover_cluster(login.channel, "/shared") == SlurmFacts(
        version="23.11.4",
        partitions={"gpu": {"max_seconds": 86400, "nodes": 4, "gpus_per_node": 8, "default": True}},
        kill_wait=5,
        min_job_age=120,
        has_accounting=True,
        container="pyxis",
        host=login.host,
    )


def test_a_cluster_that_says_little_has_the_defaults_of_slurm() -> None:
    login = Login(
        VERSION,
        ("scontrol config", Answer(0, "KillWait = UNLIMITED\n", "")),
        ("sh -c", Answer(1, "", "")),
    )
    facts = discover_cluster(login.channel, "/shared")
    assert (facts.kill_wait, facts.min_job_age, facts.has_accounting, facts.container) == (30, 300, False, None)
    assert (facts.partitions, facts.default_partition) == ({}, None)


@pytest.mark.parametrize(
    ("found", "container"), [("command -v apptainer", "apptainer"), ("command -v singularity", "singularity")]
)
def test_containers_start_with_what_the_login_node_has(found: str, container: str) -> None:
    login = Login(VERSION)
    login.call = _answer_only(login, found)  # type: ignore[method-assign]
    assert discover_cluster(login.channel, "/shared").container == container


def _answer_only(login: Login, command: str) -> Any:
    """As `call`, but of the shell's commands only `command` succeeds."""
    plain = login.call

    def call(do: str, data: bytes = b"", **arguments: Any) -> dict[str, Any]:
        argv = arguments.get("argv", [])
        if argv[:2] == ["sh", "-c"]:
            return {"code": 0 if argv[2] == command else 1, "out": "", "err": ""}
        return plain(do, data, **arguments)

    return call


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ([("sinfo --version", Answer(127, "", "sinfo: not found"))], UsageError, "has no Slurm: sinfo: not found."),
        ([("sinfo --version", Answer(1, "", ""))], UsageError, "has no Slurm: sinfo says nothing."),
        ([("sinfo --version", Answer(0, "slurm\n", ""))], UsageError, "has no Slurm: slurm."),
        ([("sinfo --version", Answer(0, "slurm 20.11.9", ""))], UsageError, "has Slurm 20.11; mlbench needs 21.08"),
        ([("sinfo --version", Answer(0, "slurm 21.07.1", ""))], UsageError, "has Slurm 21.07; mlbench needs 21.08"),
        ([VERSION, ("scontrol ping", Answer(1, "is DOWN\n", ""))], UnreachableError, "not responding: is DOWN"),
    ],
)
def test_a_cluster_that_cannot_be_used_says_why(
    answers: list[tuple[str, Answer]], error: type[MlbenchError], words: str
) -> None:
    with pytest.raises(error) as caught:
        discover_cluster(Login(*answers).channel, "/shared")
    assert words in caught.value.message


def test_the_oldest_version_is_taken() -> None:
    assert discover_cluster(Login(("sinfo --version", Answer(0, "slurm-wlm 21.08.5", ""))).channel, "/d")


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "choice", "error", "words"),
    [
        (FACTS, {}, None, ""),
        (FACTS, {"partition": "gpu"}, None, ""),
        (FACTS, {"partition": "gpus"}, NotFoundError, 'no partition "gpus", only cpu, gpu. Did you mean "gpu"'),
        (replace(FACTS, partitions={"gpu": part(False)}), {"partition": "gpu"}, None, ""),
        (replace(FACTS, partitions={"gpu": part(False)}), {}, UsageError, "has no default partition"),
        (FACTS, {"slurm_account": "a"}, UsageError, "has no accounting"),
        (FACTS, {"qos": "q"}, UsageError, "has no accounting"),
    ],
)
def test_what_a_cluster_does_not_have_cannot_be_chosen(
    facts: SlurmFacts, choice: dict[str, Any], error: type[MlbenchError] | None, words: str
) -> None:
    details = replace(DETAILS, **choice)
    if error is None:
        check_choice(Login().channel, facts, details)
        return
    with pytest.raises(error) as caught:
        check_choice(Login().channel, facts, details)
    assert words in caught.value.message


ASSOCIATIONS = "physics|normal,long\nphysics|short\nchemistry|\n|normal\n\n"


def test_associations_are_read_by_account() -> None:
    assert parse_associations(ASSOCIATIONS) == {"physics": {"normal", "long", "short"}, "chemistry": set()}
    assert parse_associations("no separator") == {}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({}, None),
        ({"slurm_account": "physics", "qos": "short"}, None),
        ({"qos": "long"}, None),
        ({"slurm_account": "chemistry", "qos": "anything"}, None),  # of which no QOS is known
        ({"slurm_account": "biology"}, 'no account "biology" on this cluster, only chemistry, physics.'),
        ({"slurm_account": "physics", "qos": "fast"}, 'cannot use the QOS "fast", only long, normal, short.'),
        ({"qos": "fast"}, 'cannot use the QOS "fast", only long, normal, short.'),
    ],
)
def test_accounts_and_qos_are_those_of_the_user(choice: dict[str, Any], words: str | None) -> None:
    login = Login(("sacctmgr", Answer(0, ASSOCIATIONS, "")), ("id -un", Answer(0, "ann\n", "")))
    facts, details = replace(FACTS, has_accounting=True), replace(DETAILS, **choice)
    if words is None:
        check_choice(login.channel, facts, details)
        assert "user=ann" in login.commands[-1]
        return
    with pytest.raises(NotFoundError) as caught:
        check_choice(login.channel, facts, details)
    assert words in caught.value.message


@pytest.mark.parametrize("answer", [Answer(1, ASSOCIATIONS, ""), Answer(0, "", "")])
def test_a_database_that_does_not_answer_forbids_nothing(answer: Answer) -> None:
    facts, details = replace(FACTS, has_accounting=True), replace(DETAILS, slurm_account="biology", qos="fast")
    check_choice(Login(("sacctmgr", answer)).channel, facts, details)


# --- nodes -----------------------------------------------------------------------------------------------------------


def probe(node: str, sees: bool = True, python: str = "3.11.7", torch: str = "2.5.0") -> NodeProbe:
    return NodeProbe(node, sees, python, torch)


def test_answers_of_nodes_are_sorted_and_compared_with_the_token() -> None:
    text = "n2|abc|3.11.7|2.5.0\nsrun: warning\nn1|xyz||\nn3|abc|3.12.0|\na|b\n"
    assert parse_probes(text, "abc") == [
        probe("n1", False, "", ""),
        probe("n2"),
        probe("n3", python="3.12.0", torch=""),
    ]


@pytest.mark.parametrize(
    ("probes", "words"),
    [
        ([probe("n1"), probe("n2")], None),
        ([probe("n1", torch=""), probe("n2", torch="")], None),
        ([probe("n1"), probe("n2", False), probe("n3", False)], "/shared is not shared: n2, n3 cannot read"),
        ([probe("n1"), probe("n2", python="")], "/opt/python cannot be run on n2."),
        ([probe("n1"), probe("n2", python="3.12.0")], "versions of Python: n1 3.11.7, n2 3.12.0"),
        ([probe("n1"), probe("n2", torch="")], "versions of torch: n1 2.5.0, n2 none"),
    ],
)
def test_nodes_share_a_folder_and_an_environment(probes: list[NodeProbe], words: str | None) -> None:
    if words is None:
        check_probes(probes, DETAILS)
        return
    with pytest.raises(UsageError) as caught:
        check_probes(probes, DETAILS)
    assert words in caught.value.message


def test_nodes_are_probed_by_one_short_job_in_a_folder_that_is_removed() -> None:
    login = Login(("srun", Answer(0, "n1|x|3.11.7|\n", "")))
    details = replace(DETAILS, partition="gpu", slurm_account="a", qos="q", constraint="c")
    (found,) = probe_nodes(login.channel, details, 3)
    assert (found.node, found.sees_folder) == ("n1", False)  # another token
    srun, remove = login.commands
    (path,) = login.files
    assert srun[:11] == [
        *("srun", "--nodes=3", "--ntasks-per-node=1", "--time=0-00:01:00", "--immediate=30", "--chdir=/"),
        *("--partition=gpu", "--account=a", "--qos=q", "--constraint=c", "--job-name=mlbench-probe"),
    ]
    assert srun[11:13] == ["/bin/sh", "-c"]
    assert srun[14:16] == [path, "/opt/python"]
    assert path.startswith("/shared/probe-")
    assert remove == ["rm", "-r", path.removesuffix("/token")]


def test_lines_of_the_user_run_before_the_probe() -> None:
    login = Login(("srun", Answer(0, "n1|x|3.11.7|\n", "")))
    probe_nodes(login.channel, replace(DETAILS, setup="module load python"), 1)
    words = login.commands[0][login.commands[0].index("/bin/bash") :]
    assert words[:2] == ["/bin/bash", "-c"]
    assert words[2].startswith("module load python\n")
    assert words[-2] == "/opt/python"


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (Answer(None, "", ""), CapacityError, "could not be probed: no answer within 60 s"),
        (Answer(1, "", "x\nsrun: error: Unable to allocate resources"), CapacityError, "srun: error: Unable to"),
        (Answer(1, "", "srun: Immediate execution impossible"), CapacityError, "Immediate execution impossible"),
        (Answer(1, "", "srun: error: invalid partition specified: x"), UsageError, "does not know the partition"),
    ],
)
def test_nodes_that_cannot_be_probed_say_why(answer: Answer, error: type[MlbenchError], words: str) -> None:
    login = Login(("srun", answer))
    with pytest.raises(error) as caught:
        probe_nodes(login.channel, DETAILS, 1)
    assert words in caught.value.message
    assert login.commands[-1][0] == "rm"


@pytest.mark.parametrize(("partition", "words"), [(None, []), ("gpu", ["-p", "gpu"])])
def test_idle_nodes_are_added_up(partition: str | None, words: list[str]) -> None:
    login = Login(("sinfo", Answer(0, "3\n4\nN/A\n", "")))
    assert free_nodes(login.channel, replace(DETAILS, partition=partition)) == 7
    assert login.commands == [["sinfo", "-h", "-t", "idle", "-o", "%D", *words]]
