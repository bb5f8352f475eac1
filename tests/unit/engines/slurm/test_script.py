"""The batch script of a run: what it asks for, and what is refused before anything is submitted."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.engines.machines.details import PartitionRecord, SlurmDetails
from mlbench_cli.engines.slurm.script import (
    check_request,
    format_time,
    make_slurm_plan,
    render_script,
    wall_seconds,
)
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.model.spec import RunSpec

GPU = PartitionRecord(max_seconds=3600, nodes=4, gpus_per_node=8, default=True)
DETAILS = SlurmDetails(folder="/shared/it's mine", partitions={"gpu": GPU}, kill_wait=5)
SPEC = RunSpec(
    name="demo-2", cluster="c", engine="slurm", task="custom", preset="custom", argv=("true",), backend="gloo",
    workers=2, timeout=600.0,
)  # fmt: skip


def test_a_script_asks_for_what_the_run_wants() -> None:
    details = replace(DETAILS, partition="gpu", slurm_account="a", qos="q", constraint="c", switches="1@10:00")
    spec = replace(SPEC, device="gpu", gpus_per_worker=4, cpus=8.0, nodes=("n1", "n2"), absent_seconds=9.0)
    script = render_script(spec, details, "/code")
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {
        *("--job-name=mlbench-demo-2", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--no-requeue"),
        *("--export=ALL", "--partition=gpu", "--account=a", "--qos=q", "--constraint=c", "--switches=1@10:00"),
        *("--gres=gpu:4", "--cpus-per-task=8", "--time=0-00:16:00", "--nodelist=n1,n2", "--no-kill"),
    } <= set(options)


def test_the_wall_time_is_the_timeout_with_a_margin_within_the_partitions_limit() -> None:
    assert wall_seconds(SPEC, DETAILS) == 960
    assert wall_seconds(replace(SPEC, timeout=3600.0), DETAILS) == 3600
    assert format_time(61) == "0-00:02:00"
    assert format_time(90061) == "1-01:02:00"


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"workers": 5}, CapacityError, "4"),
        ({"timeout": 3601.0}, UsageError, "--timeout 3600s"),
        ({"device": "gpu", "gpus_per_worker": 9}, CapacityError, "8"),
        ({"image": "busybox"}, UsageError, "--setup"),
    ],
)
def test_what_slurm_would_accept_and_never_start_is_refused(
    change: dict[str, object], error: type[Exception], word: str
) -> None:
    spec = replace(SPEC, **change)
    with pytest.raises(error) as caught:
        (render_script(spec, DETAILS, "/code"), make_slurm_plan(spec, DETAILS))
    assert word in f"{caught.value.message} {caught.value.hint}"  # type: ignore[attr-defined]


def test_containers_start_through_what_the_cluster_has() -> None:
    spec = replace(SPEC, image="me/image:1", data_dir="/data")
    pyxis = render_script(spec, replace(DETAILS, container="pyxis", folder="/s"), "/code")
    assert "--container-image=me/image:1 --container-mounts=/s:/s,/data:/data" in pyxis
    plan = make_slurm_plan(spec, replace(DETAILS, container="apptainer", folder="/s"))
    assert plan["launcher"] == ["apptainer", "exec", "--bind", "/s", "--bind", "/data", "docker://me/image:1"]
    assert not plan["installed_code_only"]


def test_ranks_have_less_patience_than_slurm() -> None:
    assert make_slurm_plan(SPEC, DETAILS)["grace"] == 2.5
    assert make_slurm_plan(SPEC, replace(DETAILS, kill_wait=30))["grace"] == 5.0


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        ("docker://me/image:1", "docker://me/image:1"),
        ("oras://me/image:1", "oras://me/image:1"),
        ("/images/me.sif", "/images/me.sif"),
    ],
)
def test_ranks_start_in_a_container_of_apptainer(image: str, shown: str) -> None:
    plan = make_slurm_plan(replace(SPEC, image=image), replace(DETAILS, container="apptainer", folder="/s"))
    assert plan["launcher"] == ["apptainer", "exec", "--bind", "/s", shown]


@pytest.mark.parametrize(("maker", "flag"), [("", "--nv"), ("nvidiactl", "--nv"), ("kfd", "--rocm")])
def test_a_container_gets_the_libraries_of_the_gpus_of_its_node(tmp_path: Path, maker: str, flag: str) -> None:
    program = tmp_path / "singularity"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    if maker:
        (tmp_path / maker).touch()
    spec = replace(SPEC, image="me/image:1", gpus_per_worker=1)
    plan = make_slurm_plan(spec, replace(DETAILS, container=str(program), folder="/s"))
    shell, option, text, *words = plan["launcher"]
    words = [shell, option, text.replace("/dev/", f"{tmp_path}/"), *words]
    done = subprocess.run([*words, "python", "a b"], capture_output=True, text=True, check=True)
    assert done.stdout == f"exec {flag} --bind /s docker://me/image:1 python a b\n"


@pytest.mark.parametrize("change", [{"workers": 4}, {"timeout": 3600.0}, {"device": "gpu", "gpus_per_worker": 8}])
def test_what_a_partition_just_has_is_not_refused(change: dict[str, Any]) -> None:
    check_request(replace(SPEC, **change), DETAILS)
