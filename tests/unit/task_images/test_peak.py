"""What share of its device's speed a training uses, by hand, and the speeds of datasheets."""

import pytest

from task_images.peak import Peak, Utilization, find_datasheet


def test_utilization_is_per_rank_and_of_both_peaks() -> None:
    found = Utilization(12e9, "counted", Peak(1e10, 2e10), 0.5, ranks=4).to_dict()
    assert found["model_flops_per_second_per_rank"] == 1.5e9
    assert (found["mfu_of_measured_peak"], found["mfu"]) == (0.15, 0.075)
    assert "mfu" not in Utilization(12e9, "counted", Peak(1e10, None), 0.5, 4).to_dict()


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_devices_with_similar_names_have_their_own_speed(name: str, tflops: float) -> None:
    assert find_datasheet(name) == pytest.approx(tflops * 1e12)


def test_what_no_datasheet_lists_is_unknown() -> None:
    assert find_datasheet("NVIDIA GeForce RTX 4090") is None
