"""Published rates: every fact of a series, which files of a folder are read, and what is refused."""

from pathlib import Path

import pytest

from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.results.analysis.rates import (
    PublishedSeries,
    Rate,
    load_survey,
    parse_table,
    read_logs,
    select_series,
)

HEAD = "| DNN | BS | CONNECTION | METHOD | 2 GPUs | 4 GPUs |\n| --- | --- | --- | --- | --- | --- |\n"


def log_name(dnn: str = "resnet50", method: str = "wfbp", batch: int = 64, workers: int = 4, rdma: int = 0) -> str:
    return f"rdma-{rdma}-method-{method}-dnn-{dnn}-bs-{batch}-nworker-{workers}-compressor-none-thres-0.log"


def total(rate: float, workers: int = 4, unit: str = "img") -> str:
    return f"[1,0]<stdout>:Total {unit}/sec on {workers} GPU(s): {rate} +-1.0\n"


# --- the survey -----------------------------------------------------------------------------------------------------


def test_a_series_of_the_survey_begins_with_one_gpu_and_has_the_deviation_of_others() -> None:
    """Rows of the published table, as printed there."""
    [found] = select_series(["survey-2020/ResNet-50/10GbE/MG-WFBP"])
    assert (found.source, found.model, found.network, found.method) == (
        *("survey-2020", "ResNet-50", "10GbE", "MG-WFBP"),
    )
    assert (found.batch_size, found.unit) == (64, "images")
    assert found.rates[0] == Rate(1, 253.1, None)
    assert found.rates[1].workers == 4
    assert all(rate.deviation is not None for rate in found.rates[1:])
    assert [rate.workers for rate in found.rates] == [1, 4, 8, 16, 32]


def test_words_of_the_survey_are_the_names_of_three_networks_three_models_and_seven_methods() -> None:
    series = load_survey()
    assert {one.network for one in series} == {"10GbE", "100GbIB", "100GbE"}
    assert {one.model for one in series} == {"ResNet-50", "BERT-Base", "BERT-Large"}
    assert {one.unit for one in series if one.model.startswith("BERT")} == {"sentences"}
    assert len({one.method for one in series}) == 7
    assert len({one.name for one in series}) == 63


def test_several_selections_are_put_together_in_their_order() -> None:
    found = select_series(["survey-2020/BERT-Base/100GbE/BSP-PS", "survey-2020/ResNet-50/10GbE/BSP-PS"])
    assert [one.model for one in found] == ["BERT-Base", "ResNet-50"]
    assert select_series([]) == ()


def test_a_word_that_is_only_a_part_of_a_label_is_unknown() -> None:
    with pytest.raises(UsageError) as caught:
        select_series(["survey-2020/PS"])
    assert caught.value.message == 'The published table survey-2020 has no series "survey-2020/PS".'
    labels = str(caught.value.hint).removeprefix("Its labels: ").split(", ")
    assert labels == sorted(labels)
    assert len(labels) == 3 + 3 + 7
    with pytest.raises(UsageError):
        select_series(["survey-2020/10GbE/100GbE"])


# --- logs -----------------------------------------------------------------------------------------------------------


def test_logs_are_put_together_by_model_batch_network_and_method(tmp_path: Path) -> None:
    (tmp_path / log_name(workers=8)).write_text(total(1900.0, 8))
    (tmp_path / log_name()).write_text(total(1000.0) + "noise\n" + total(1004.0))
    (tmp_path / log_name(method="bspps")).write_text(total(500.0))
    (tmp_path / log_name(batch=32)).write_text(total(900.0))
    (tmp_path / log_name(rdma=1)).write_text(total(1100.0))
    (tmp_path / log_name(dnn="bert")).write_text(total(60.0, unit="sen"))
    (tmp_path / "notes.txt").write_text(total(1.0))
    source = tmp_path.name
    assert sorted(read_logs(tmp_path), key=lambda one: (one.model, one.batch_size, one.network, one.method)) == [
        PublishedSeries(source, "BERT-Large", 64, "10GbE", "WFBP-A2A", "sentences", (Rate(4, 60.0, None),)),
        PublishedSeries(source, "ResNet-50", 32, "10GbE", "WFBP-A2A", "images", (Rate(4, 900.0, None),)),
        PublishedSeries(source, "ResNet-50", 64, "100GbIB", "WFBP-A2A", "images", (Rate(4, 1100.0, None),)),
        PublishedSeries(source, "ResNet-50", 64, "10GbE", "BSP-PS", "images", (Rate(4, 500.0, None),)),
        # 1000 and 1004: the deviation of the source is that of all runs, not of a sample
        PublishedSeries(
            *(source, "ResNet-50", 64, "10GbE", "WFBP-A2A", "images"), (Rate(4, 1002.0, 2.0), Rate(8, 1900.0, None))
        ),
    ]


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


def test_tables_come_before_logs_and_folders_are_searched(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / log_name()).write_text(total(1.0))
    (tmp_path / "README.md").write_text(f"# Results\n{HEAD}| BERT-Base | 8 | 100GbE TCP | BSP-PS | 1.5 +- 0.5 | 3 |\n")
    table, logs = read_logs(tmp_path)
    assert table == PublishedSeries(
        tmp_path.name, "BERT-Base", 8, "100GbE", "BSP-PS", "sentences", (Rate(2, 1.5, 0.5), Rate(4, 3.0, None))
    )
    assert logs.model == "ResNet-50"
    assert read_logs(tmp_path / "README.md")[0].source == "README.md"
    assert list(select_series([str(tmp_path)])) == [table, logs]


def test_text_that_is_no_utf_8_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "mine.log").write_bytes(b"\xff\xfe\n" + total(7.5).encode())
    [found] = read_logs(tmp_path / "mine.log")
    assert found.rates == (Rate(4, 7.5, None),)


def test_a_folder_without_rates_says_what_a_rate_looks_like(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        read_logs(tmp_path)
    assert caught.value.message == (
        f'{tmp_path} has no rates: neither "Total img/sec on 4 GPU(s): 925.0" nor a ddl-benchmarks table.'
    )
    assert str(caught.value.hint).endswith("or a table that is shipped: survey-2020")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.log").mkdir()
    with pytest.raises(NotFoundError, match=r"a\.log cannot be read: Is a directory\."):
        read_logs(tmp_path)


# --- tables ---------------------------------------------------------------------------------------------------------


def test_every_table_of_a_text_has_its_own_numbers_of_gpus() -> None:
    other = "| DNN | BS | CONNECTION | METHOD | 16 GPUs |\n|---|---|---|---|---|\n| VGGNet | 1 | IB | m | 5 |\n"
    first, second = parse_table(f"{HEAD}| ResNet-50 | 64 | 10GbE | a | 1 | 2 |\n\nText.\n\n{other}", "s")
    assert first.rates == (Rate(2, 1.0, None), Rate(4, 2.0, None))
    assert (second.rates, second.unit, second.source) == ((Rate(16, 5.0, None),), "images", "s")


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


def test_a_table_without_numbers_of_gpus_is_none() -> None:
    assert (
        parse_table("| DNN | BS | CONNECTION | METHOD |\n|---|---|---|---|\n| ResNet-50 | 64 | IB | a |\n", "s") == []
    )
