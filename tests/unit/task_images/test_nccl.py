"""What is read from NCCL's log and variables. The lines are of NCCL 2.2x on machines with InfiniBand and without."""

from pathlib import Path

import torch

from task_images.contract import Contract
from task_images.gpu import describe, log_to, parse_log
from task_images.world import World

INFINIBAND = """gpu-1:51:51 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>
NCCL version 2.27.3+cuda12.9
gpu-1:51:77 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>
gpu-1:51:77 [0] NCCL INFO Using network IB
gpu-1:51:77 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
gpu-1:51:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
SOCKETS = """pod-0:1:1 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so)
pod-0:1:9 [0] NCCL INFO NET/IB : No device found.
pod-0:1:9 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.8.0.4<0>
pod-0:1:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.8.0.4<0>
"""


def test_the_network_and_the_ways_of_channels_are_read() -> None:
    assert parse_log(INFINIBAND) == {
        "version": "2.27.3+cuda12.9",
        "network": "IB",
        "interfaces": "[0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>",
        "ways": ["NET/IB/GDRDMA", "P2P/CUMEM"],
    }
    assert parse_log(SOCKETS) == {"network": "Socket", "interfaces": "[0]eth0:10.8.0.4<0>"}
    assert parse_log("nothing of NCCL") == {}
    rccl = "RCCL version : 2.22.3-develop:8fdb8c0\nHIP version  : 6.4.43482-0f2d60242\n"
    found = parse_log(rccl + SOCKETS)
    assert (found["version"], found["network"]) == ("2.22.3-develop:8fdb8c0", "Socket")


# The forms of src/enqueue.cc and src/init.cc of NCCL 2.30.
TUNING = """gpu-1:51:77 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels, 2 p2p
gpu-1:51:51 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}
gpu-1:51:51 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}
gpu-1:51:51 [0] NCCL INFO Broadcast: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
"""


def test_algorithms_protocols_and_channels_are_read() -> None:
    assert parse_log(TUNING) == {
        "channels": {"collective": 16, "p2p": 16},
        "choices": [
            {"collective": "AllReduce", "bytes": 1048576, "algorithm": "RING", "protocol": "LL128", "channels": 16},
            {"collective": "Broadcast", "bytes": 8, "algorithm": "TREE", "protocol": "LL", "channels": 1},
        ],
    }


# As public logs of a machine with EFA and of one with GPUDirect show them; a first attempt had failed.
EFA = """ip-10-0-0-7:51:77 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
ip-10-0-0-7:51:77 [0] NCCL INFO Using network Socket
ip-10-0-0-7:51:77 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.17.1
ip-10-0-0-7:51:77 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 32 nics)
ip-10-0-0-7:51:77 [0] NCCL INFO Using network AWS Libfabric
ip-10-0-0-7:51:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA
"""


def test_the_last_network_that_was_chosen_counts() -> None:
    assert parse_log(EFA) == {"network": "AWS Libfabric", "ways": ["NET/AWS Libfabric/GDRDMA"]}
    for name in ("Libfabric", "FasTrak", "GPUDirectTCPX_v7", "gIB"):
        assert parse_log(f"gpu-1:51:77 [0] NCCL INFO Using network {name}\n")["network"] == name


def test_the_log_goes_to_the_output_folder_unless_the_user_has_another_wish(tmp_path: Path) -> None:
    variables = {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "eth0"}
    log_to(tmp_path, variables)
    (tmp_path / "nccl.log").write_text(SOCKETS)
    facts = describe(variables)
    assert facts["network"] == "Socket"
    assert facts["variables"] == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(tmp_path / "nccl.log"),
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    for wish in ({"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG_FILE": "/elsewhere"}):
        chosen = dict(wish)
        log_to(tmp_path, chosen)
        assert chosen == wish
    assert describe({"NCCL_DEBUG_FILE": "/nowhere/at/all"}) == {"variables": {"NCCL_DEBUG_FILE": "/nowhere/at/all"}}


def test_what_the_machine_has_stands_beside_what_was_used() -> None:
    facts = describe({"MLBENCH_FABRIC": "3200 RDMA (gIB)"})
    assert facts == {"variables": {}, "fabric": "RDMA (gIB)", "nominal_gbits": 3200}
    assert describe({"MLBENCH_FABRIC": "many of them"}) == {"variables": {}}


def test_a_rank_with_nccl_can_say_what_it_runs_on() -> None:
    contract = Contract({"WORLD_SIZE": "2", "MLBENCH_BACKEND": "nccl"})
    world = World(contract, torch.device("cpu"), 1, grouped=True)
    assert "variables" in world.backend_facts()
    assert "mpi" not in world.framework_facts()["libraries"]
