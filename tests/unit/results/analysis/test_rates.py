"""Published rates: every fact of a series, which files of a folder are read, and what is refused."""

from pathlib import Path

import pytest

from mlbench_cli.results.analysis.published import (
    load_survey,
    parse_table,
    read_logs,
)

HEAD = "| DNN | BS | CONNECTION | METHOD | 2 GPUs | 4 GPUs |\n| --- | --- | --- | --- | --- | --- |\n"


def log_name(dnn: str = "resnet50", method: str = "wfbp", batch: int = 64, workers: int = 4, rdma: int = 0) -> str:
    return f"rdma-{rdma}-method-{method}-dnn-{dnn}-bs-{batch}-nworker-{workers}-compressor-none-thres-0.log"


def total(rate: float, workers: int = 4, unit: str = "img") -> str:
    return f"[1,0]<stdout>:Total {unit}/sec on {workers} GPU(s): {rate} +-1.0\n"


# --- the survey -----------------------------------------------------------------------------------------------------


# --- logs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "name"),
    [
        *(("bspa2a", "BSP-A2A"), ("wfbp", "WFBP-A2A"), ("mgwfbp", "MG-WFBP"), ("bspps", "BSP-PS")),
        *(("bytescheduler", "ByteScheduler-A2A"), ("wfbpps", "WFBP-PS"), ("byteschedulerps", "ByteScheduler-PS")),
        ("other", "other"),
    ],
)
def test_switches_of_its_programs_have_the_names_of_the_survey(tmp_path: Path, switch: str, name: str) -> None:
    (tmp_path / log_name(method=switch)).write_text(total(1.0))
    [found] = read_logs(tmp_path)
    assert found.method == name
    if switch != "other":
        assert name in {one.method for one in load_survey()}


@pytest.mark.parametrize(
    ("dnn", "model"),
    [("resnet50", "ResNet-50"), ("bert", "BERT-Large"), ("bert_base", "BERT-Base"), ("vgg16", "vgg16")],
)
def test_models_of_its_programs_have_the_names_of_the_survey(tmp_path: Path, dnn: str, model: str) -> None:
    (tmp_path / log_name(dnn=dnn)).write_text(total(1.0))
    assert [one.model for one in read_logs(tmp_path)] == [model]


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        "| ResNet-50 | 64 | 10GbE | a | 1 |",
        "| ResNet-50 | 64 | 10GbE | a | 1 | 2 | 3 |",
        "| ResNet-50 | 6.4 | 10GbE | a | 1 | 2 |",
        "| --- | 64 | 10GbE | a | 1 | 2 |",
        "|  | 64 | 10GbE | a | 1 | 2 |",
        "| ResNet-50 | 64 | 10GbE | a | x | 1 +- |",
        "ResNet-50 64 10GbE a 1 2",
    ],
)
def test_rows_of_another_shape_are_passed_over(row: str) -> None:
    good = "| ResNet-50 | 64 | 10GbE | good | 1 | 2 |"
    assert [one.method for one in parse_table(f"{HEAD}{row}\n{good}\n", "s")] == ["good"]
