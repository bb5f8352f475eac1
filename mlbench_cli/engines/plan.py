"""From a spec to the plan of its agents: the variables of the task contract (task_images/contract.py), what each rank
runs, and on which node. Pure: the same spec gives the same plan.
"""

from collections.abc import Mapping, Sequence

from mlbench_cli.agent.messages import AT_START, FaultPlan, MachinesPlan, RankPlan, RunPlan
from mlbench_cli.engines.placement import NodeShare, share_nodes
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import HOLD_SECONDS, RunSpec, canonical_json
from mlbench_cli.tasks.catalog import packages_of

MEETING_SECONDS = 300.0
MACHINES_HOLD_SECONDS = 24 * 3600.0
PODS_GRACE_SECONDS = 10.0  # of the 60 that Kubernetes gives a container to end; the rest is for handing over
GRACE_SECONDS = 5.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RUN = "task_images.run"  # a rank of the task that its first argument names
PREPARE = "task_images.prepare"  # prepares the data of the task that its first argument names


# --- the same on every engine -----------------------------------------------------------------------------------------


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


# --- of runs with a node for each machine or pod ----------------------------------------------------------------------


def make_plan(
    spec: RunSpec,
    details: MachineDetails,
    nodes: Sequence[NodeShare],
    *,
    lock: str,
    launcher: Sequence[str] = (),
    grace: float = GRACE_SECONDS,
) -> MachinesPlan:
    """The plan of a run on these nodes. `lock` says how its machines are kept from other runs (see agent/lock.py).

    The agents complete MASTER_ADDR, MASTER_PORT and MLBENCH_HOSTS when all are there.
    """
    contract = contract_environment(spec, AT_START, AT_START, AT_START)
    return {
        **plan_ranks(spec, "MachinesRun", {**details.env, **spec.env, **contract}, {}),
        "nodes": [
            {
                "name": node.name,
                "address": node.address,
                "workers": list(node.workers),
                "ranks": [plan_rank(spec, rank) for rank in node.ranks(spec)],
            }
            for node in nodes
        ],
        "python": details.python,
        "installed_code_only": spec.runs_task_program and not launcher,
        "launcher": list(launcher),
        "interface": details.interface,
        "interface_variables": list(INTERFACE_VARIABLES),
        "meeting_seconds": MEETING_SECONDS + (spec.absent_seconds or 0.0),
        "grace": grace,
        "lock": lock,
        "hold_seconds": MACHINES_HOLD_SECONDS,
        "echo": False,
        "stays": False,
        "collects": None,
    }


def pod_host(spec: RunSpec, worker: int) -> str:
    """The name of a worker's pod, by the run's headless service."""
    return f"{spec.name}-{worker}.{spec.name}"


def make_pods_plan(spec: RunSpec, environment: Mapping[str, str], *, lock: str, collects: list[int]) -> MachinesPlan:
    """The plan of a run whose nodes are the pods of its workers. Their devices are the container's."""
    task = find_task(spec.argv)
    return {
        **plan_ranks(spec, "PodsRun", environment, {}),
        "gpus_per_worker": 0,
        "nodes": [
            {
                "name": pod_host(spec, number),
                "address": None,
                "workers": list(node.workers),
                "ranks": [plan_rank(spec, rank) for rank in node.ranks(spec)],
            }
            for number, node in enumerate(share_nodes(spec))
        ],
        "python": None,
        "installed_code_only": spec.runs_task_program,
        "launcher": [],
        "interface": None,
        "interface_variables": [],
        "meeting_seconds": spec.pods.start_timeout + MEETING_SECONDS,
        "grace": PODS_GRACE_SECONDS,
        "lock": lock,
        "hold_seconds": float(HOLD_SECONDS),
        "echo": True,
        "stays": True,
        "collects": collects,
        "packages": [] if task is None else list(packages_of(task)),
    }


def find_task(argv: Sequence[str]) -> str | None:
    """The task whose program a command runs: `python -m task_images.run TASK`; None for other commands."""
    words = [*argv, "", "", "", ""]
    return words[3] if words[:2] == ["python", "-m"] and words[2] in (RUN, PREPARE) else None
