"""The tables of machines and prices, compared with the numbers that the clouds publish."""

import json
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from providers.aks import machines as azure
from providers.eks import machines as aws
from providers.eks.prices import LINES_BEFORE_HEADER, _hourly_prices, read_offers
from providers.eks.topology import has_topology
from providers.gke import families
from providers.gke import machines as google
from providers.gke import prices as google_prices
from providers.gke.prices import parse_skus, price_machines


def refusal(call: Any, *options: Any) -> tuple[str, str]:
    with pytest.raises(UsageError) as caught:
        call(*options)
    return caught.value.message, str(caught.value.hint)


# Amazon EC2, "Accelerated computing instances": vCPUs, GPUs and network cards with EFA.
AWS_PUBLISHED = {
    **{f"{family}.xlarge": (4, 1, 0) for family in ("g4dn", "g5", "g6", "g6e")},
    **{f"{family}.2xlarge": (8, 1, 0) for family in ("g4dn", "g5", "g6", "g6e")},
    **{f"{family}.4xlarge": (16, 1, 0) for family in ("g4dn", "g5", "g6", "g6e")},
    **{f"{family}.8xlarge": (32, 1, 1) for family in ("g4dn", "g5", "g6", "g6e")},
    **{f"{family}.16xlarge": (64, 1, 1) for family in ("g4dn", "g5", "g6", "g6e")},
    **{f"{family}.12xlarge": (48, 4, 1) for family in ("g4dn", "g5", "g6", "g6e")},
    "g4dn.metal": (96, 8, 1),
    "g5.24xlarge": (96, 4, 1),
    "g5.48xlarge": (192, 8, 1),
    "g6.24xlarge": (96, 4, 1),
    "g6.48xlarge": (192, 8, 1),
    "g6e.24xlarge": (96, 4, 2),
    "g6e.48xlarge": (192, 8, 4),
    "p3.2xlarge": (8, 1, 0),
    "p3.8xlarge": (32, 4, 0),
    "p3.16xlarge": (64, 8, 0),
    "p3dn.24xlarge": (96, 8, 1),
    "p4d.24xlarge": (96, 8, 4),
    "p4de.24xlarge": (96, 8, 4),
    "p5.4xlarge": (16, 1, 1),
    "p5.48xlarge": (192, 8, 32),
    "p5e.48xlarge": (192, 8, 32),
    "p5en.48xlarge": (192, 8, 16),
    "p6-b200.48xlarge": (192, 8, 8),
}


def test_gpu_machines_of_aws_have_the_published_vcpus_gpus_and_network_cards() -> None:
    assert {name: (item.vcpus, item.gpus, item.efa) for name, item in aws.GPU_MACHINES.items()} == AWS_PUBLISHED
    assert all(item.name == name for name, item in aws.GPU_MACHINES.items())


@pytest.mark.parametrize(
    ("family", "gpu"),
    [
        *(("g4dn", "T4"), ("g5", "A10G"), ("g6", "L4"), ("g6e", "L40S"), ("p3", "V100"), ("p3dn", "V100")),
        *(("p4d", "A100"), ("p4de", "A100-80GB"), ("p5", "H100"), ("p5e", "H200"), ("p5en", "H200")),
        ("p6-b200", "B200"),
    ],
)
def test_all_sizes_of_a_family_of_aws_have_its_gpu(family: str, gpu: str) -> None:
    assert {item.gpu for name, item in aws.GPU_MACHINES.items() if name.startswith(f"{family}.")} == {gpu}


@pytest.mark.parametrize(
    ("name", "gbits"),
    [
        *(("p3dn.24xlarge", 100), ("p4d.24xlarge", 400), ("p4de.24xlarge", 400), ("p5.48xlarge", 3200)),
        *(("p5e.48xlarge", 3200), ("p5en.48xlarge", 3200), ("p6-b200.48xlarge", 3200)),
        *(("g6e.24xlarge", 200), ("g6e.48xlarge", 400), ("g5.xlarge", None), ("g5.48xlarge", None)),
    ],
)
def test_the_bandwidth_of_efa_is_the_published_one(name: str, gbits: int | None) -> None:
    assert aws.machine_of(name).fabric_gbits == gbits


def test_a_machine_without_efa_has_no_fast_network_however_fast_its_card_is() -> None:
    assert aws.Machine("p4d.24xlarge", 96, gbits=400).fabric_gbits is None
    assert aws.Machine("p9.48xlarge", 96, efa=4, gbits=800).fabric_gbits == 800


@pytest.mark.parametrize(
    ("name", "vcpus"),
    [
        *(("t3.medium", 2), ("t3.large", 2), ("m5.large", 2), ("m5.xlarge", 4), ("m5.2xlarge", 8), ("c5.4xlarge", 16)),
        *(("m7i.48xlarge", 192), ("m7i.metal-48xl", 0), ("t3.nano", 0)),
    ],
)
def test_the_vcpus_of_a_cpu_machine_follow_from_its_size_or_are_unknown(name: str, vcpus: int) -> None:
    assert aws.machine_of(name) == aws.Machine(name, vcpus)


@pytest.mark.parametrize("name", ["m6g.large", "c7gn.2xlarge", "t4g.small", "g5g.xlarge", "a1.large", "r8gd.4xlarge"])
def test_arm_machines_of_aws_are_rejected(name: str) -> None:
    message, hint = refusal(aws.machine_of, name)
    assert f"{name} is an ARM machine" in message
    assert aws.CPU_DEFAULT in hint


@pytest.mark.parametrize("name", ["inf2.xlarge", "trn1.2xlarge", "trn2u.48xlarge", "dl1.24xlarge", "g4ad.xlarge"])
def test_accelerators_of_other_makers_are_rejected(name: str) -> None:
    message, hint = refusal(aws.machine_of, name)
    assert message == f"{name} has no NVIDIA GPUs."
    assert "--gpu-type L4" in hint


@pytest.mark.parametrize("name", ["m5", "m5.", ".xlarge", "M5.xlarge", "m5 xlarge", "m5.xlarge.x"])
def test_what_is_no_instance_type_is_rejected_with_an_example(name: str) -> None:
    assert refusal(aws.machine_of, name) == (
        f'"{name}" is not an instance type of EC2.',
        "For example: --machine-type g5.xlarge",
    )


@pytest.mark.parametrize(
    ("name", "has_gpus"),
    [
        *(("g7e.2xlarge", True), ("gr6.4xlarge", True), ("p6-b300.48xlarge", True), ("p5.4xlarge", True)),
        *(("m5.large", False), ("hpc7a.96xlarge", False), ("c6g.large", False), ("x2gd.large", False)),
    ],
)
def test_families_g_and_p_of_aws_have_gpus(name: str, has_gpus: bool) -> None:
    assert aws.is_gpu_family(name) is has_gpus


def test_an_equivalent_of_a_machine_has_the_same_gpus_and_is_no_bare_metal() -> None:
    assert aws.equivalent_types(aws.machine_of("p5e.48xlarge")) == ["p5e.48xlarge", "p5en.48xlarge"]
    assert aws.equivalent_types(aws.machine_of("g4dn.metal")) == ["g4dn.metal"]
    assert aws.equivalent_types(aws.machine_of("m5.xlarge")) == ["m5.xlarge"]
    assert aws.equivalent_types(aws.machine_of("g5.24xlarge")) == ["g5.24xlarge", "g5.12xlarge"]


def test_a_machine_with_other_gpus_cannot_replace_one() -> None:
    a10g = aws.machine_of("g5.12xlarge")
    assert aws.require_equivalent(a10g, ["g5.24xlarge"]) == ["g5.12xlarge", "g5.24xlarge"]
    assert refusal(aws.require_equivalent, a10g, ["g5.24xlarge", "g6.12xlarge"]) == (
        "g6.12xlarge (4 × L4) cannot replace g5.12xlarge (4 × A10G).",
        "Equivalent types: g5.12xlarge, g5.24xlarge",
    )
    message, _ = refusal(aws.require_equivalent, a10g, ["m5.xlarge"])
    assert message == "m5.xlarge (no GPU) cannot replace g5.12xlarge (4 × A10G)."


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        *(("g6e.xlarge", True), ("g6.xlarge", False), ("p3.2xlarge", False), ("p3dn.24xlarge", True)),
        *(("p4d.24xlarge", True), ("p4de.24xlarge", True), ("p5.4xlarge", True), ("p5en.48xlarge", True)),
        *(("p6-b200.48xlarge", True), ("trn1.2xlarge", True), ("hpc6a.48xlarge", True), ("m5.xlarge", False)),
    ],
)
def test_ec2_tells_the_place_of_machines_with_fast_networks(name: str, is_told: bool) -> None:
    assert has_topology(name) is is_told


# Google, "GPU machine types": GPUs, vCPUs and GB of memory.
GOOGLE_PUBLISHED = {
    "g2-standard-4": (1, 4, 16),
    "g2-standard-8": (1, 8, 32),
    "g2-standard-12": (1, 12, 48),
    "g2-standard-16": (1, 16, 64),
    "g2-standard-32": (1, 32, 128),
    "g2-standard-24": (2, 24, 96),
    "g2-standard-48": (4, 48, 192),
    "g2-standard-96": (8, 96, 384),
    "g4-standard-48": (1, 48, 180),
    "g4-standard-96": (2, 96, 360),
    "g4-standard-192": (4, 192, 720),
    "g4-standard-384": (8, 384, 1440),
    "a2-highgpu-1g": (1, 12, 85),
    "a2-highgpu-2g": (2, 24, 170),
    "a2-highgpu-4g": (4, 48, 340),
    "a2-highgpu-8g": (8, 96, 680),
    "a2-megagpu-16g": (16, 96, 1360),
    "a2-ultragpu-1g": (1, 12, 170),
    "a2-ultragpu-2g": (2, 24, 340),
    "a2-ultragpu-4g": (4, 48, 680),
    "a2-ultragpu-8g": (8, 96, 1360),
    "a3-highgpu-1g": (1, 26, 234),
    "a3-highgpu-2g": (2, 52, 468),
    "a3-highgpu-4g": (4, 104, 936),
    "a3-highgpu-8g": (8, 208, 1872),
    "a3-megagpu-8g": (8, 208, 1872),
    "a3-ultragpu-8g": (8, 224, 2952),
    "a4-highgpu-8g": (8, 224, 3968),
}
UNPRICED = ("a3-ultragpu", "a4-highgpu")  # the catalog's names of their parts are not known
WORDS = (
    "E2 Instance",
    "N1 Predefined Instance",
    "G2 Instance",
    "G4 Instance",
    "A2 Instance",
    "A3 Instance",
    "A3Plus Instance",
)
GPUS = ("Tesla T4", "L4", "Tesla A100", "Tesla A100 80GB", "H100 80GB", "H100 80GB Plus")


def parts(core: float, ram: float, gpu: float) -> dict[str, float]:
    """The price list of a region in which all families cost the same."""
    cpus = {f"{words} Core": core for words in WORDS} | {f"{words} Ram": ram for words in WORDS}
    return cpus | {f"Nvidia {name}": gpu for name in GPUS} | {"RTX 6000 96GB": gpu}


def test_gpu_machines_of_google_have_the_published_number_of_gpus() -> None:
    assert {name: machine.gpus for name, machine in google.SHAPED.items()} == {
        name: gpus for name, (gpus, _, _) in GOOGLE_PUBLISHED.items()
    }


@pytest.mark.parametrize(("place", "rates"), [(0, (0, 0, 1)), (1, (1, 0, 0)), (2, (0, 1, 0))])
def test_a_machine_of_google_costs_its_published_gpus_vcpus_and_memory(
    place: int, rates: tuple[float, float, float]
) -> None:
    prices = price_machines(parts(*rates))
    priced = {name: numbers[place] for name, numbers in GOOGLE_PUBLISHED.items() if not name.startswith(UNPRICED)}
    assert {name: price for name, price in prices.items() if name in google.SHAPED} == priced


def test_machines_without_gpus_cost_their_vcpus_and_memory() -> None:
    prices = price_machines(parts(1, 0.001, 1000))
    assert {name: price for name, price in prices.items() if name not in google.SHAPED} == {
        "e2-standard-2": 2.008,
        "e2-standard-4": 4.016,
        "n1-standard-4": 4.015,
        "n1-standard-8": 8.03,
        "n1-standard-16": 16.06,
        "n1-standard-32": 32.12,
        "nvidia-tesla-t4": 1000,
    }


@pytest.mark.parametrize("missing", ["G2 Instance Core", "G2 Instance Ram", "Nvidia L4"])
def test_a_machine_with_an_unpriced_part_has_no_price(missing: str) -> None:
    known = parts(1, 1, 1)
    del known[missing]
    prices = price_machines(known)
    assert not [name for name in prices if name.startswith("g2-")]
    assert "a2-highgpu-1g" in prices


def sku(description: str, usage: str = "OnDemand", units: str = "0", nanos: int = 5 * 10**8) -> dict[str, Any]:
    tiers = [{"unitPrice": {"units": "9"}}, {"unitPrice": {"units": "8"}}]
    rates = [*tiers, {"unitPrice": {"units": units, "nanos": nanos}}]
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": ["us-central1"],
        "pricingInfo": [{"pricingExpression": {"tieredRates": rates}}],
    }


@pytest.mark.parametrize(
    ("item", "name", "way"),
    [
        (sku("A2 Instance Core running in Americas"), "A2 Instance Core", "on-demand"),
        (sku("Nvidia L4 GPU running in Iowa"), "Nvidia L4", "on-demand"),
        (sku("Spot Preemptible G2 Instance Ram running in Iowa", "Preemptible"), "G2 Instance Ram", "spot"),
        (
            sku("Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Iowa", "Preemptible"),
            *("Nvidia Tesla A100", "spot"),
        ),
    ],
)
def test_parts_are_named_without_their_place(item: dict[str, Any], name: str, way: str) -> None:
    assert [(found.name, found.way, found.regions, found.price) for found in parse_skus([item])] == [
        (name, way, ("us-central1",), 0.5)
    ]


@pytest.mark.parametrize(
    "item",
    [
        sku("Commitment v1: A2 Cpu in Iowa for 1 Year"),
        sku("A3 Instance Core DWS Defined Duration running in Iowa"),
        sku("A3 Instance Core running in Iowa - Calendar Mode"),
        sku("N2 Sole Tenancy Instance Core running in Iowa"),
        sku("A2 Instance Core running in Americas", "Commit1Yr"),
        sku("A2 Instance Core running in Americas", nanos=0),
    ],
)
def test_other_offers_for_the_same_part_are_left_out(item: dict[str, Any]) -> None:
    assert list(parse_skus([item])) == []


def test_prices_of_a_region_are_the_sums_of_its_own_parts_for_each_way_of_buying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [
        *(sku(f"E2 Instance {part} running in Iowa") for part in ("Core", "Ram")),
        *(
            sku(f"Spot Preemptible E2 Instance {part} running in Iowa", "Preemptible", nanos=10**8)
            for part in ("Core", "Ram")
        ),
    ]
    monkeypatch.setattr(google_prices, "_list_skus", lambda: items)
    found = google_prices.fetch_prices(["us-central1", "europe-west4"])
    assert (found.provider, found.source) == ("gke", "Cloud Billing catalog")
    assert found.on_demand == {"us-central1": {"e2-standard-2": 5.0, "e2-standard-4": 10.0}}
    assert found.spot == {"us-central1": {"e2-standard-2": 1.0, "e2-standard-4": 2.0}}


def test_a_price_of_google_is_in_units_and_billionths() -> None:
    assert [item.price for item in parse_skus([sku("A2 Instance Core", units="2", nanos=933908)])] == [2.000933908]


@pytest.mark.parametrize(
    ("name", "vcpus"),
    [
        *(("n1-standard-4", 4), ("e2-highmem-16", 16), ("n2-highcpu-96", 96), ("n1-custom-6-20480", 6)),
        *(("g2-standard-12", 12), ("c3-standard-8-lssd", 8), ("a3-highgpu-8g", None), ("e2-medium", None)),
    ],
)
def test_the_vcpus_of_google_are_in_the_name(name: str, vcpus: int | None) -> None:
    assert google.Machine(name).vcpus == vcpus


@pytest.mark.parametrize(("gpus", "machine"), [(1, "n1-standard-8"), (2, "n1-standard-16"), (4, "n1-standard-32")])
def test_t4s_are_attached_to_machines_with_eight_vcpus_for_each(gpus: int, machine: str) -> None:
    assert google.choose_machine(None, gpus, "t4") == google.Machine(machine, "nvidia-tesla-t4", gpus)
    assert google.choose_machine("n1-highmem-4", gpus, None) == google.Machine("n1-highmem-4", "nvidia-tesla-t4", gpus)
    message, hint = refusal(google.choose_machine, "n2-standard-4", gpus, "t4")
    assert "only to n1 machines, not to n2-standard-4" in message
    assert hint == f"--machine-type {machine}"


def test_three_t4s_cannot_be_attached() -> None:
    message, _ = refusal(google.choose_machine, "n1-standard-8", 3, "t4")
    assert message == "A machine may have 1, 2, 4 × nvidia-tesla-t4, not 3."


def test_a_gpu_with_machines_of_its_own_is_not_attached() -> None:
    message, hint = refusal(google.choose_machine, "n1-standard-8", None, "l4")
    assert message == "nvidia-l4 cannot be attached to n1-standard-8; it comes with its own machine types."
    assert hint.startswith("Machines with nvidia-l4: g2-standard-4 (1), g2-standard-8 (1),")


def test_one_l4_comes_with_32_gb_of_memory_unless_the_machine_is_named() -> None:
    assert google.choose_machine(None, None, "l4").name == "g2-standard-8"
    assert google.choose_machine(None, 2, "l4").name == "g2-standard-24"
    assert google.choose_machine("g2-standard-4", None, None).name == "g2-standard-4"


def test_without_options_google_gives_a_machine_without_gpus() -> None:
    assert google.choose_machine(None, None, None) == google.Machine("n1-standard-4")
    assert google.choose_machine(None, 0, None) == google.Machine("n1-standard-4")
    assert google.choose_machine("n2-standard-8", 0, None) == google.Machine("n2-standard-8")


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("e2-standard-4", ("E2_CPUS", "CPUS")),
        ("n2d-standard-4", ("N2D_CPUS", "CPUS")),
        ("a3-highgpu-8g", ("A3_CPUS", "CPUS")),
    ],
)
def test_a_family_of_google_has_its_own_quota_of_vcpus(machine: str, names: tuple[str, str]) -> None:
    assert families.cpu_quota_names(machine) == names


@pytest.mark.parametrize(("kind", "count"), [("tcpx", 4), ("tcpxo", 8), ("gib", 0), (None, 0)])
def test_a_fast_network_of_google_has_one_network_per_card(kind: str | None, count: int) -> None:
    names = [f"mlbench-demo-net{number}" for number in range(1, count + 1)]
    assert families.count_networks(kind) == count
    assert families.name_networks("demo", kind) == names


def test_a_pool_lists_the_networks_of_its_cards_or_lets_gke_make_them() -> None:
    pool, labels = families.configure_pool("demo", "tcpx")
    assert pool == {
        "additional_node_network_configs": [
            {"network": f"mlbench-demo-net{number}", "subnetwork": f"mlbench-demo-net{number}"}
            for number in (1, 2, 3, 4)
        ]
    }
    assert labels == {}
    assert families.configure_pool("demo", "gib") == (
        {"accelerator_network_profile": "auto"},
        {"cloud.google.com/gke-networking-dra-driver": "true"},
    )


def test_the_record_says_which_fast_network_a_machine_has_and_whether_it_is_set_up() -> None:
    assert families.fabric_facts("a3-megagpu-8g", None) == {"name": "GPUDirect-TCPXO", "gbits": 1600}
    assert families.fabric_facts("a3-megagpu-8g", "tcpxo") == {
        "name": "GPUDirect-TCPXO",
        "gbits": 1600,
        "setup": "tcpxo",
    }
    assert families.fabric_facts("a9-newgpu-8g", "gib") == {"setup": "gib"}
    assert families.fabric_facts(None, None) == {}


# Microsoft Learn, "GPU accelerated virtual machine sizes": GPUs and vCPUs.
AZURE_PUBLISHED = {
    "Standard_NC4as_T4_v3": ("t4", 1, 4),
    "Standard_NC8as_T4_v3": ("t4", 1, 8),
    "Standard_NC16as_T4_v3": ("t4", 1, 16),
    "Standard_NC64as_T4_v3": ("t4", 4, 64),
    "Standard_NV36ads_A10_v5": ("a10", 1, 36),
    "Standard_NV72ads_A10_v5": ("a10", 2, 72),
    "Standard_NC24ads_A100_v4": ("a100", 1, 24),
    "Standard_NC48ads_A100_v4": ("a100", 2, 48),
    "Standard_NC96ads_A100_v4": ("a100", 4, 96),
    "Standard_ND96asr_v4": ("a100-40gb", 8, 96),
    "Standard_ND96amsr_A100_v4": ("a100", 8, 96),
    "Standard_NC40ads_H100_v5": ("h100-nvl", 1, 40),
    "Standard_NC80adis_H100_v5": ("h100-nvl", 2, 80),
    "Standard_ND96isr_H100_v5": ("h100", 8, 96),
    "Standard_ND96isr_H200_v5": ("h200", 8, 96),
}


def test_gpu_machines_of_azure_have_the_published_gpus_and_vcpus() -> None:
    assert {name: (item.gpu, item.gpus, item.vcpus) for name, item in azure.GPU_MACHINES.items()} == AZURE_PUBLISHED


@pytest.mark.parametrize("vcpus", [2, 4, 8, 16, 32, 48, 64])
@pytest.mark.parametrize("series", ["s_v5", "as_v5"])
def test_the_name_of_a_general_size_of_azure_tells_its_vcpus(vcpus: int, series: str) -> None:
    name = f"Standard_D{vcpus}{series}"
    assert azure.find_machine(name.lower()) == azure.Machine(name, vcpus=vcpus)
    assert azure.choose_machine(name.removeprefix("Standard_"), None, None).name == name


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("Standard_ND128isr_NDR_GB200_v6", "gb200"),
        ("Standard_ND128isr_GB300_v6", "gb300"),
        ("Standard_NC320ds_xl_RTXPRO6000BSE_v6", "rtx-pro-6000"),
        ("Standard_NX9_v9", "gpu"),
    ],
)
def test_the_gpu_of_a_new_size_of_azure_is_read_from_its_name(name: str, gpu: str) -> None:
    assert azure.choose_machine(name, None, None) == azure.Machine(name, gpu)


@pytest.mark.parametrize("name", ["Standard_NC6", "NC24rs_v3", "standard_nd40rs_v2", "Standard_ND96isr_MI300X_v5"])
def test_gpus_of_azure_that_images_do_not_support_are_rejected(name: str) -> None:
    message, hint = refusal(azure.find_machine, name)
    assert message.endswith("has GPUs that current images do not support.")
    assert message.lower().startswith("standard_n")
    assert "Standard_NC4as_T4_v3" in hint


@pytest.mark.parametrize("name", ["Standard D4", "D4s/v5", "D4;v5"])
def test_what_is_no_vm_size_is_rejected_with_an_example(name: str) -> None:
    assert refusal(azure.find_machine, name) == (
        f'--machine-type "{name}" is not the name of a VM size.',
        "For example Standard_D4s_v5",
    )


@pytest.mark.parametrize("options", [(1, None), (None, "t4"), (2, "t4")])
def test_a_general_size_of_azure_has_no_gpu_to_offer(options: tuple[int | None, str | None]) -> None:
    message, hint = refusal(azure.choose_machine, "Standard_D4s_v5", *options)
    assert message == "Standard_D4s_v5 has no GPU."
    assert hint.startswith("Machines with t4: Standard_NC4as_T4_v3 (1)")


def test_gpus_of_azure_have_the_names_of_other_clouds_too() -> None:
    assert azure.choose_machine(None, 8, "H200-141GB").name == "Standard_ND96isr_H200_v5"
    assert azure.choose_machine(None, None, "h100-94gb").name == "Standard_NC40ads_H100_v5"
    assert azure.choose_machine(None, None, "A100-80GB").name == "Standard_NC24ads_A100_v4"
    assert azure.choose_machine(None, None, "nvidia-h100-80gb").name == "Standard_ND96isr_H100_v5"


def product(*dimensions: tuple[str, str]) -> dict[str, Any]:
    entries = {str(at): {"unit": unit, "pricePerUnit": {"USD": usd}} for at, (unit, usd) in enumerate(dimensions)}
    return {"terms": {"OnDemand": {"x": {"priceDimensions": entries}}, "Reserved": {}}}


def test_only_hourly_prices_above_zero_are_read_from_the_price_list_of_aws() -> None:
    text = json.dumps(product(("Hrs", "1.0060000000"), ("Hrs", "0.0000000000"), ("Quantity", "7"), ("Hrs", "0.5")))
    assert list(_hourly_prices(json.loads(text))) == [1.006, 0.5]
    assert list(_hourly_prices({"terms": {}})) == [] == list(_hourly_prices({}))


HEADER = {
    "TermType": "OnDemand",
    "Unit": "Hrs",
    "PricePerUnit": "1.25",
    "Currency": "USD",
    "Product Family": "Compute Instance",
    "Instance Type": "g5.xlarge",
    "Tenancy": "Shared",
    "Operating System": "Linux",
    "Pre Installed S/W": "NA",
    "CapacityStatus": "Used",
}


def offers(*rows: dict[str, str]) -> list[str]:
    lines = [",".join(f'"{row[name]}"' for name in HEADER) for row in rows]
    return [*['"about","the file"'] * LINES_BEFORE_HEADER, ",".join(f'"{name}"' for name in HEADER), *lines]


@pytest.mark.parametrize(
    "other",
    [
        *({"TermType": "Reserved"}, {"Unit": "Quantity"}, {"Currency": "CNY"}, {"Tenancy": "Dedicated"}),
        *({"Operating System": "Windows"}, {"Pre Installed S/W": "SQL Ent"}, {"PricePerUnit": "0.0000000000"}),
        *({"CapacityStatus": "UnusedCapacityReservation"}, {"Instance Type": "x1.32xlarge"}),
        {"Product Family": "Compute Instance (bare metal)"},
    ],
)
def test_rows_of_other_offers_in_the_file_of_aws_are_left_out(other: dict[str, str]) -> None:
    assert read_offers(offers(HEADER | other)) == {}
    assert read_offers(offers(HEADER | other | {"PricePerUnit": other.get("PricePerUnit", "9")}, HEADER)) == {
        "g5.xlarge": 1.25
    }


def test_the_file_of_aws_has_five_lines_before_the_header_and_the_highest_price_counts() -> None:
    lines = offers(HEADER | {"PricePerUnit": "2"}, HEADER, HEADER | {"Instance Type": "m5.xlarge"})
    assert lines[5].startswith('"TermType"')
    assert read_offers(lines) == {"g5.xlarge": 2.0, "m5.xlarge": 1.25}
    assert read_offers([*lines, '"OnDemand","Hrs"']) == {"g5.xlarge": 2.0, "m5.xlarge": 1.25}


def test_a_file_of_aws_without_a_column_is_not_read() -> None:
    with pytest.raises(KeyError, match="TermType"):
        read_offers(offers(HEADER)[LINES_BEFORE_HEADER + 1 :])
