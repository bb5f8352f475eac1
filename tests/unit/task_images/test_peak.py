"""Peak rates: the table of datasheets against a second source."""

import pytest

from task_images.peak import (
    DATASHEET,
    find_datasheet,
)

# The rates that torchtitan (tools/utils.py, get_peak_flops) and the model-serving tool LLMRoofline (hardware_dict.py)
# divide by, in TFLOP/s. Both name dense bf16.
ELSEWHERE = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA B200": 2250,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "AMD Instinct MI300X": 1300,
    "AMD Instinct MI325X": 1300,
    "AMD Instinct MI355X": 2500,
}


@pytest.mark.parametrize(("name", "rate"), ELSEWHERE.items())
def test_the_peak_of_a_device_is_what_others_divide_by(name: str, rate: float) -> None:
    assert find_datasheet(name) == pytest.approx(rate * 1e12, rel=0.01)


def test_a_device_that_is_not_in_the_table_has_no_peak() -> None:
    assert find_datasheet("NVIDIA GeForce RTX 4090") is None


def test_a_longer_name_is_not_hidden_by_a_shorter_one_before_it() -> None:
    """The first word that fits counts, so "L40" before "L40S" would give every L40S half its rate."""
    words = [word for word, _rate, _source in DATASHEET]
    for number, word in enumerate(words):
        assert not [earlier for earlier in words[:number] if earlier in word], word
