"""A translation program, from contract to result: corpus, model, training.

A task defines its corpus (`Source`) and its model (`make_task`); the procedure is common.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from task_images.cache import DataIdentity, made_up
from task_images.contract import Contract
from task_images.errors import EnvironmentUnfitError
from task_images.goals import GoalWatch
from task_images.parameters import TranslationSettings
from task_images.seeds import seed_all
from task_images.translation.training import TranslationTask, train_translation
from task_images.world import World, training_session

C = TypeVar("C")
S = TypeVar("S", bound=TranslationSettings)


@dataclass(frozen=True)
class Source(Generic[C]):
    """The source of a corpus.

    name          name of the data set, e.g. WMT16
    write_sample  (folder, seed) -> folder: writes generated sentences, and returns the folder to read
    read          (folder of the files, folder of cache entries) -> corpus
    identify      corpus -> identity for the result
    """

    name: str
    write_sample: Callable[[Path, int], Path]
    read: Callable[[Path, Path], C]
    identify: Callable[[C], DataIdentity]

    def load(self, generate: bool, contract: Contract) -> C:
        """The corpus. Raises EnvironmentUnfitError if its files are missing or damaged."""
        if generate:
            with tempfile.TemporaryDirectory() as own:
                return self.read(self.write_sample(Path(own), contract.seed), Path(own))
        if contract.data_dir is None:
            raise EnvironmentUnfitError(
                f"no folder with {self.name} was given",
                "Run with --data-dir FOLDER, or choose the preset tiny, which makes its own data.",
            )
        return self.read(Path(contract.data_dir), Path(contract.data_dir))


def train(
    contract: Contract, settings: S, source: Source[C], make_task: Callable[[S, World, C], TranslationTask]
) -> None:
    """Train to the goal and report the result. `data` is "sample" for generated sentences. Raises TaskUsageError."""
    generate = settings.data == "sample"
    kind = "made-up" if generate else source.name
    with training_session(contract, f"{kind} English-German", generate) as (world, report):
        corpus = source.load(generate, contract)
        report.data_identity(made_up(source.identify(corpus).counts) if generate else source.identify(corpus))
        seed_all(contract.seed)
        goal = GoalWatch("BLEU-Score", ">=", settings.goal_full, settings.goal_light, contract.goal)
        train_translation(world, report, make_task(settings, world, corpus), goal)
