"""What a user can get wrong ends in one clear line and the exit code of the table, never in a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.contract import EnvironmentUnfitError, need
from task_images.run import run
from task_images.translation.sample import write_sample
from task_images.wikitext2_awd_lstm.task import main as awd_lstm
from task_images.wmt16_gnmt.data import prepare
from task_images.wmt16_gnmt.task import main as gnmt
from task_images.wmt17_transformer.data import write_dictionary
from task_images.wmt17_transformer.task import main as transformer

MAINS = {"wikitext2_awd_lstm": awd_lstm, "wmt16_gnmt": gnmt, "wmt17_transformer": transformer}
ALL = pytest.mark.parametrize("task", list(MAINS))

Leave = Callable[..., tuple[int, str]]


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Leave:
    """Runs a task with the preset tiny and changes; gives its exit code and what it said on standard error."""

    def start(task: str, data_dir: Path | None = None, **changes: Any) -> tuple[int, str]:
        parameters = load_task(task).resolve("tiny", {"epochs": 1, **changes})
        monkeypatch.setenv("MLBENCH_PARAMETERS", json.dumps(parameters))
        monkeypatch.setenv("MLBENCH_OUTPUT_DIR", str(tmp_path / "output"))
        monkeypatch.setenv("MLBENCH_DATA_DIR", str(data_dir or ""))
        with pytest.raises(SystemExit) as left:
            run(MAINS[task])
        assert isinstance(left.value.code, int)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return left.value.code, said

    return start


OFFICIAL = {"wikitext2_awd_lstm": "wikitext-2", "wmt16_gnmt": "wmt16", "wmt17_transformer": "wmt17"}


@ALL
def test_without_data_the_environment_is_unfit(leave: Leave, task: str, tmp_path: Path) -> None:
    code, said = leave(task, data=OFFICIAL[task])
    assert code == 78
    assert "no folder with" in said
    assert "--data-dir" in said
    code, said = leave(task, tmp_path, data=OFFICIAL[task])
    assert code == 78
    assert str(tmp_path) in said


@pytest.mark.slow
@pytest.mark.parametrize("task", ["wmt16_gnmt", "wmt17_transformer"])
def test_a_global_batch_that_does_not_divide(leave: Leave, task: str) -> None:
    code, said = leave(task, global_batch=1001, largest_pass=250)
    assert code == 64
    assert "1001 cannot be shared evenly by 1 ranks with 5 passes" in said


@pytest.mark.parametrize(("width", "heads"), [(64, 3), (9, 1)])
def test_a_width_that_its_heads_cannot_share(leave: Leave, width: int, heads: int) -> None:
    code, said = leave("wmt17_transformer", width=width, heads=heads)
    assert code == 64
    assert f"a width of {width} is odd, or cannot be divided among {heads} heads" in said


def test_a_limit_that_leaves_no_test_sentence(leave: Leave, tmp_path: Path) -> None:
    corpus_17(tmp_path)
    code, said = leave("wmt17_transformer", tmp_path, data="wmt17", longest_test=1)
    assert code == 78
    assert "holds no usable pair of sentences" in said


def test_a_missing_package_is_named() -> None:
    need("sacrebleu", "sacremoses")
    with pytest.raises(EnvironmentUnfitError, match="the package no_such_package is not installed"):
        need("sacrebleu", "no_such_package")


def corpus_17(folder: Path) -> None:
    write_sample(folder, train=60, test=4, seed=1)
    write_dictionary(folder, 200)


@pytest.mark.slow
def test_the_vocabulary_of_a_checkpoint_must_be_that_of_the_run(leave: Leave, tmp_path: Path) -> None:
    corpus_17(tmp_path)
    small = {"data": "wmt17", "width": 8, "inner": 8, "layers": 1, "longest_translation": 5}
    code, said = leave("wmt17_transformer", tmp_path, **small, vocabulary=208, checkpoint_every=1)
    assert (code, said) == (0, "")
    [checkpoint] = map(str, (tmp_path / "output" / "checkpoints").iterdir())
    code, said = leave("wmt17_transformer", tmp_path, **small, vocabulary=216, resume=checkpoint)
    assert code == 64
    assert "made with vocabulary = 208, this run has 216" in said
    code, said = leave("wmt17_transformer", tmp_path, **small, vocabulary=208, resume=str(tmp_path / "none"))
    assert code == 78
    assert "finds no checkpoint" in said
    code, said = leave("wmt17_transformer", tmp_path, **small, vocabulary=64)
    assert code == 78
    assert "the model has room for 63" in said
    main = Path(checkpoint, "main.pt")
    main.write_bytes(main.read_bytes()[:1000])
    code, said = leave("wmt17_transformer", tmp_path, **small, vocabulary=208, resume=checkpoint)
    assert code == 78
    assert "cannot be read as a checkpoint" in said


def test_a_checkpoint_of_another_task(leave: Leave, tmp_path: Path) -> None:
    corpus_17(tmp_path)
    small = {"data": "wmt17", "width": 8, "inner": 8, "layers": 1, "longest_translation": 5, "vocabulary": 208}
    leave("wmt17_transformer", tmp_path, **small, checkpoint_every=1)
    code, said = leave("wikitext2_awd_lstm", resume=str(next((tmp_path / "output" / "checkpoints").iterdir())))
    assert code == 64
    assert "made with task = 'wmt17_transformer', this run has 'wikitext2_awd_lstm'" in said


def test_texts_that_are_not_parallel(leave: Leave, tmp_path: Path) -> None:
    corpus_17(tmp_path)
    with (tmp_path / "train.de").open("a") as file:
        file.write("Ein Satz zu viel.\n")
    code, said = leave("wmt17_transformer", tmp_path, data="wmt17")
    assert code == 78
    assert "train.en ends after 60 lines" in said


@pytest.mark.slow
def test_gnmt_on_prepared_text_and_with_a_line_missing(leave: Leave, tmp_path: Path) -> None:
    write_sample(tmp_path, train=60, test=4, seed=1)
    for language in ("en", "de"):
        (tmp_path / f"test.{language}").rename(tmp_path / f"newstest2014.{language}")
    prepare(tmp_path, tmp_path / "wmt16", merges=50)
    code, said = leave("wmt16_gnmt", tmp_path, data="wmt16", width=8, layers=2, longest_translation=5)
    assert (code, said) == (0, "")
    assert (tmp_path / "wmt16" / "newstest2014.de").is_file()
    reference = tmp_path / "wmt16" / "newstest2014.de"
    reference.write_text(reference.read_text().splitlines()[0] + "\n")
    code, said = leave("wmt16_gnmt", tmp_path, data="wmt16", width=8, layers=2)
    assert code == 78
    assert "newstest2014.de has 1 lines, but there are 4 test pairs" in said


def test_nothing_of_the_data_folder_but_the_cache_is_written(leave: Leave, tmp_path: Path) -> None:
    corpus_17(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    leave("wmt17_transformer", tmp_path, data="wmt17", width=8, inner=8, layers=1, longest_translation=5)
    after = {path.name for path in tmp_path.iterdir()} - {"output"}
    assert {name for name in after if not name.endswith((".cache", ".lock"))} == {*before}
    assert all((tmp_path / name).read_bytes() == content for name, content in before.items())
