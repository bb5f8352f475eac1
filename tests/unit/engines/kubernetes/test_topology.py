"""Where the workers' nodes are in the cloud's network."""

from mlbench_cli.engines.kubernetes.topology import find_topology
from mlbench_cli.model.run import Observation, WorkerState

# Labels as public listings of such nodes show them.
A3_ULTRA = {
    "cloud.google.com/gce-topology-block": "4f1a",
    "cloud.google.com/gce-topology-subblock": "91c2",
    "cloud.google.com/gce-topology-host": "77de",
    "topology.kubernetes.io/zone": "europe-west1-b",
}
P4D = {
    "topology.k8s.aws/network-node-layer-1": "nn-1111111111example",
    "topology.k8s.aws/network-node-layer-2": "nn-2222222222example",
    "topology.k8s.aws/network-node-layer-3": "nn-3333333333example",
    "topology.kubernetes.io/zone": "us-west-2a",
}


def test_labels_of_both_clouds_become_one_map() -> None:
    nodes = [
        {"metadata": {"name": name, "labels": labels}} for name, labels in (("a", A3_ULTRA), ("b", P4D), ("c", {}))
    ]
    layers = {f"layer_{number}": f"nn-{str(number) * 10}example" for number in (1, 2, 3)}
    assert find_topology([*nodes, {"metadata": {"name": "d"}}]) == {
        "a": {"zone": "europe-west1-b", "block": "4f1a", "subblock": "91c2", "host": "77de"},
        "b": {"zone": "us-west-2a", **layers},
        "c": {},
        "d": {},
    }


def test_an_observation_holds_it_only_if_something_is_known() -> None:
    plain = Observation(1.0, (WorkerState(0, node="a"),))
    assert "topology" not in plain.to_dict()
    placed = Observation(1.0, (WorkerState(0, node="a"),), topology={"a": {"block": "4f1a"}})
    assert Observation.from_dict(placed.to_dict()) == placed
    assert Observation.from_dict(plain.to_dict()) == plain
