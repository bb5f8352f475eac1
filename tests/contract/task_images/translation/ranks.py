"""Trains a small version of one of the three language tasks; started as one or more ranks by the tests.

The variable FOLDERS is FOLDER, or FOLDER and CHECKPOINTS, in JSON; TASK is the task.

Prints `# NAME` before each training's events, and leaves the trained parameters as FOLDER/NAME.pt. With CHECKPOINTS,
the task is trained once more, from the checkpoint in CHECKPOINTS/NAME on, as `NAME resumed`.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from task_images.contract import Contract
from task_images.data import seed_all
from task_images.report import Reporter
from task_images.translation.sample import write_sample
from task_images.translation.training import Translation
from task_images.wikitext2_awd_lstm import task as awd_lstm
from task_images.wikitext2_awd_lstm.data import Corpus
from task_images.wikitext2_awd_lstm.task import Settings as AwdLstmSettings
from task_images.wmt16_gnmt import task as gnmt
from task_images.wmt16_gnmt.data import prepare
from task_images.wmt16_gnmt.data import read_corpus as read_wmt16
from task_images.wmt16_gnmt.task import Settings as GnmtSettings
from task_images.wmt17_transformer import task as transformer
from task_images.wmt17_transformer.data import read_corpus as read_wmt17
from task_images.wmt17_transformer.data import write_dictionary
from task_images.wmt17_transformer.task import Settings as TransformerSettings
from task_images.world import World, open_world
from tests.contract.task_images.ranks import Parameters

STREAMS = 8  # of AWD-LSTM, all ranks together
COMMON: Parameters = {
    "report_every": 1,
    "checkpoint_every": 5,
    "epochs": 2,
    "goal_full": 100.0,
    "goal_light": 100.0,
}


def main() -> None:
    first, *checkpoints = json.loads(os.environ["FOLDERS"])
    folder = Path(first)
    contract = Contract()
    world = open_world(contract)
    name = os.environ["TASK"]
    train = {"awd_lstm": train_awd_lstm, "gnmt": train_gnmt, "transformer": train_transformer}[name]
    with tempfile.TemporaryDirectory() as texts:
        write_texts(Path(texts))
        train_and_keep(train, name, world, folder, Path(texts), "")
        if checkpoints:
            [resume] = map(str, Path(checkpoints[0], name, "checkpoints").iterdir())
            train_and_keep(train, f"{name} resumed", world, folder, Path(texts), resume)
    world.close()


Train = Callable[[Contract, World, Path, str], nn.Module]


def train_and_keep(train: Train, name: str, world: World, folder: Path, texts: Path, resume: str) -> None:
    os.environ["MLBENCH_OUTPUT_DIR"] = str(folder / name)
    print(f"# {name}", flush=True)
    world.contract = Contract()
    model = train(world.contract, world, texts, resume)
    if world.is_first:
        torch.save(model.state_dict(), folder / f"{name}.pt")


def write_texts(folder: Path) -> None:
    write_sample(folder, train=200, test=6, seed=1)
    write_dictionary(folder, 200)
    for language in ("en", "de"):
        (folder / f"newstest2014.{language}").write_bytes((folder / f"test.{language}").read_bytes())
    prepare(folder, folder / "prepared", merges=100)


def train_awd_lstm(contract: Contract, world: World, texts: Path, resume: str) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 50, (1601,), generator=generator, dtype=torch.int32)
    # Nothing can be learned from this, so the validation loss rises and averaging begins.
    corpus = Corpus([str(number) for number in range(50)], text[:1201], text[1201:1400], text[1400:])
    parameters = AwdLstmSettings(
        **{**COMMON, "epochs": 4, "checkpoint_every": 6, "goal_full": 1.0, "goal_light": 1.0},
        batch_size=2,
        accumulation=STREAMS // 2 // world.size,
        sequence_length=20,
        embedding=12,
        hidden=16,
        layers=2,
        learning_rate=5.0,
        switch_patience=1,
        warmup_epochs_per_rank=0.25,
        validation_streams=3,
        resume=resume,
    )
    seed_all(contract.seed)
    return awd_lstm.train(world, Reporter(world, "random numbers", True), parameters, corpus)


def train_gnmt(contract: Contract, world: World, texts: Path, resume: str) -> nn.Module:
    parameters = GnmtSettings(
        **COMMON,
        global_batch=32,
        largest_pass=8,
        width=16,
        layers=3,
        initial_range=0.4,
        warmup_updates=3,
        learning_rate=5e-3,
        longest_translation=20,
        validation_share=1.0,
        evaluation_batch=4,
        resume=resume,
    )
    seed_all(contract.seed)
    corpus = read_wmt16(texts / "prepared", texts / "cache", 75, 0)
    return run(world, gnmt.make_task(parameters, world, corpus))


def train_transformer(contract: Contract, world: World, texts: Path, resume: str) -> nn.Module:
    parameters = TransformerSettings(
        **COMMON,
        vocabulary=208,
        global_batch=1024,
        largest_pass=256,
        width=16,
        inner=32,
        layers=2,
        heads=2,
        warmup_updates=3,
        learning_rate=1e-3,
        longest_translation=30,
        validation_share=1.0,
        evaluation_batch=4,
        resume=resume,
    )
    seed_all(contract.seed)
    corpus = read_wmt17(texts, texts / "cache", 208, 80, 0)
    return run(world, transformer.make_task(parameters, world, corpus))


def run(world: World, task: Translation) -> nn.Module:
    task.run(Reporter(world, "sample", True))
    return task.model


if __name__ == "__main__":
    main()
