"""The variables of the task contract (task_images/contract.py) that follow from the spec: the same on every engine."""

from collections.abc import Mapping

from mlbench_cli.agent.messages import AT_START, FaultPlan, RankPlan, RunPlan
from mlbench_cli.model.spec import RunSpec, canonical_json


def contract_environment(spec: RunSpec, hosts: str | None, master_address: str, master_port: str) -> dict[str, str]:
    """The variables that are the same for all ranks. RANK, LOCAL_RANK, NODE_RANK and MLBENCH_OUTPUT_DIR are each rank's
    own.

    `hosts` is a comma list of the workers' names in the order of NODE_RANK; None: the agent adds it when it starts the
    ranks.
    """
    environment = {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.processes_per_worker),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": master_port,
        "MLBENCH_RUN_ID": spec.name,
        "MLBENCH_BACKEND": spec.backend,
        **({"MLBENCH_HOSTS": hosts} if hosts is not None else {}),
        "MLBENCH_DEVICE": spec.device,
        "MLBENCH_GOAL": spec.goal,
        "MLBENCH_DATA_DIR": spec.data_dir or "",
        "MLBENCH_SEED": str(spec.seed),
        "MLBENCH_PARAMETERS": canonical_json(dict(spec.parameters)).decode(),
    }
    if spec.task_path:
        environment["MLBENCH_TASK_PATH"] = spec.task_path
    if spec.anonymous:
        environment["MLBENCH_ANONYMOUS"] = "1"
    if spec.method:
        environment["MLBENCH_METHOD"] = canonical_json(dict(spec.method)).decode()
    if spec.servers:
        environment["MLBENCH_SERVERS"] = str(spec.servers)
    return environment


def thread_variables(spec: RunSpec) -> dict[str, str]:
    """Variables for the number of threads that each rank's share of its worker's CPUs allows; empty if the run sets no
    number of CPUs.

    They override the user's environment, so that the run's record is true.
    """
    if spec.cpus is None:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, int(spec.cpus) // spec.processes_per_worker))}


def plan_ranks(spec: RunSpec, kind: str, environment: Mapping[str, str], defaults: Mapping[str, str]) -> RunPlan:
    """The fields of every agent's plan. `environment` is set for all ranks, `defaults` only where the user's
    environment lacks a variable."""
    plan: RunPlan = {
        "kind": kind,
        "schema_version": 1,
        "name": spec.name,
        "spec_hash": spec.hash,
        "timeout": spec.timeout,
        "gpus_per_worker": spec.gpus_per_worker if spec.device == "gpu" else 0,
        "environment": {**environment, "PYTHONUNBUFFERED": "1", **thread_variables(spec)},
        "defaults": {**({} if spec.cpus is not None else {"OMP_NUM_THREADS": AT_START}), **defaults},
    }
    if spec.pin:
        plan["pin"] = True
    if spec.absent_seconds is not None:
        plan["absent_seconds"] = spec.absent_seconds
    if (faults := plan_faults(spec)) is not None:
        plan["faults"] = faults
    return plan


def plan_faults(spec: RunSpec) -> FaultPlan | None:
    """The plan for injecting faults and restarting ranks; None if the run does neither."""
    if not spec.has_faults:
        return None
    return {
        "script": spec.faults,
        "seed": spec.seed,
        "ranks": spec.world_size,
        "workers": spec.workers,
        "policy": spec.on_failure or "fail",
        "checkpoint_every": spec.checkpoint_every,
        "detect_seconds": spec.detect_seconds,
        "from_start": not spec.runs_task_program or "goal_full" not in spec.parameters,
    }


def plan_rank(spec: RunSpec, rank: int) -> RankPlan:
    """What one rank runs, with its placeholders, and its own variables. Folders are relative to the run's."""
    unit = spec.unit_of(rank)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - spec.ranks_of(unit)[0]),
        "NODE_RANK": str(unit),
        "MLBENCH_OUTPUT_DIR": f"output/rank-{rank}",
    }
    if rank >= spec.world_size:  # parameter servers are workers of one process each, after the others
        environment["MLBENCH_ROLE"] = "server"
    return {"rank": rank, "argv": list(spec.argv) if spec.run_on_all or rank == 0 else None, "environment": environment}
