"""The variables of the task contract (task_images/contract.py) that follow from the spec: the same on every engine."""

from mlbench_cli.spec import RunSpec, canonical_json


def contract_environment(spec: RunSpec, hosts: str, master_address: str, master_port: str) -> dict[str, str]:
    """What all ranks are given alike. RANK, LOCAL_RANK, NODE_RANK and MLBENCH_OUTPUT_DIR are each rank's own.

    `hosts` is a comma list of the workers' names in the order of NODE_RANK.
    """
    environment = {
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.processes_per_worker),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": master_port,
        "MLBENCH_RUN_ID": spec.name,
        "MLBENCH_BACKEND": spec.backend,
        "MLBENCH_HOSTS": hosts,
        "MLBENCH_DEVICE": spec.device,
        "MLBENCH_GOAL": spec.goal,
        "MLBENCH_DATA_DIR": spec.data_dir or "",
        "MLBENCH_SEED": str(spec.seed),
        "MLBENCH_PARAMETERS": canonical_json(dict(spec.parameters)).decode(),
    }
    if spec.task_path:
        environment["MLBENCH_TASK_PATH"] = spec.task_path
    if spec.calibrate:
        environment["MLBENCH_CALIBRATE"] = "1"
    if spec.method:
        environment["MLBENCH_METHOD"] = canonical_json(dict(spec.method)).decode()
    if spec.servers:
        environment["MLBENCH_SERVERS"] = str(spec.servers)
    return environment
