"""Training of AWD-LSTM: truncated backpropagation through time over parallel streams, SGD, then averaged SGD."""

import math
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.base import Placement
from task_images.comm.prepare import prepare_strategy
from task_images.contract import Contract
from task_images.harness.accumulation import GradientUpdate, count_parameters
from task_images.harness.checkpoint import load_checkpoint, save_checkpoint
from task_images.harness.distributed import World, open_world
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.goals import GoalWatch
from task_images.harness.metrics import Mean, Perplexity, TrainingLoss, collect
from task_images.harness.parameters import read_parameters
from task_images.harness.partition import shard
from task_images.harness.precision import Precision
from task_images.harness.report import Reporter
from task_images.harness.schedules import LinearWarmup
from task_images.harness.seeds import derive, seed_all
from task_images.harness.tracker import Tracker
from task_images.wikitext2_awd_lstm.averaging import RunningAverage, should_switch
from task_images.wikitext2_awd_lstm.data import Corpus, read_corpus, sequence_lengths, streams
from task_images.wikitext2_awd_lstm.model import AwdLstm, Dropout, State, regularization
from task_images.wikitext2_awd_lstm.sample import write_sample

NAME = "wikitext2_awd_lstm"
OWN_TEXT = "Python language reference (pydoc_data.topics)"


@dataclass(frozen=True)
class Parameters:
    """As in task.yaml, with the preset `spec` as defaults."""

    data: str = "wikitext-2"
    batch_size: int = 80
    accumulation: int = 1
    sequence_length: int = 70
    short_sequence_share: float = 0.05
    least_sequence_length: int = 5
    epochs: int = 750
    embedding: int = 400
    hidden: int = 1150
    layers: int = 3
    dropout_embedding: float = 0.1
    dropout_input: float = 0.65
    dropout_hidden: float = 0.2
    dropout_output: float = 0.4
    weight_drop: float = 0.5
    activation_penalty: float = 2.0
    temporal_penalty: float = 1.0
    learning_rate: float = 30.0
    warmup_epochs_per_rank: float = 3.0
    averaged_learning_rate: float = 0.0
    switch_rule: str = "stalled"
    switch_patience: int = 5
    weight_decay: float = 1.2e-6
    clip: float = 0.25
    precision: str = "fp32"
    validation_streams: int = 10
    report_every: int = 25
    checkpoint_every: int = 0
    resume: str = ""
    goal_full: float = 70.0
    goal_light: float = 90.0


def main(contract: Contract) -> None:
    parameters = read_parameters(Parameters, contract.parameters)
    world = open_world(contract)
    own_text = parameters.data == "python-topics"
    report = Reporter(world, OWN_TEXT if own_text else "WikiText-2")
    report.environment()
    report.phase("loading")
    corpus = load(parameters, contract)
    identity = corpus.identify()
    report.data_identity(
        replace(identity, official=False, reason=f"another text: {OWN_TEXT}") if own_text else identity
    )
    seed_all(contract.seed)
    Training(contract, world, report, parameters, corpus).run()
    world.close()


def load(parameters: Parameters, contract: Contract) -> Corpus:
    """The corpus that the parameters ask for. Raises EnvironmentUnfitError where it is not to be had."""
    if parameters.data == "python-topics":
        with tempfile.TemporaryDirectory() as folder:
            write_sample(Path(folder))
            return read_corpus(Path(folder))
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            "no folder with WikiText-2 was given",
            "Run with --data-dir FOLDER, or choose the preset tiny, which brings its own text.",
        )
    return read_corpus(Path(contract.data_dir))


@dataclass
class Position:
    """Where training is: epoch from 1, updates done in this epoch and in all."""

    epoch: int = 1
    in_epoch: int = 0
    total: int = 0
    validation_losses: list[float] = field(default_factory=list)


class Training:
    """One rank's training. Global batches have batch_size x accumulation x ranks streams side by side; this rank's
    `accumulation` groups of batch_size streams follow each other, each with a hidden state of its own."""

    def __init__(
        self, contract: Contract, world: World, report: Reporter, parameters: Parameters, corpus: Corpus
    ) -> None:
        p = parameters
        self.contract, self.world, self.report, self.p = contract, world, report, p
        dropout = Dropout(p.dropout_embedding, p.dropout_input, p.dropout_hidden, p.dropout_output, p.weight_drop)
        self.model = AwdLstm(len(corpus.words), p.embedding, p.hidden, p.layers, dropout).to(world.device)
        self.shares = world.size * p.accumulation
        self.words = streams(corpus.train, p.batch_size * self.shares)
        first = world.rank * p.accumulation
        self.groups = [self._own(self.words, share) for share in range(first, first + p.accumulation)]
        self.valid, self.test = corpus.valid, corpus.test
        self.tracker = Tracker(world.synchronize if world.device.type == "cuda" else None)
        self.precision = Precision(p.precision, world.device)
        self.goal = GoalWatch("Perplexity", "<=", p.goal_full, p.goal_light, contract.goal)
        self.strategy = prepare_strategy(world, GradientAllReduce)
        self.strategy.attach(Placement(world), self.model, self._make_optimizer, tracker=self.tracker)
        self.update = GradientUpdate(self.strategy, self.tracker, self.precision, p.clip)
        self.average = RunningAverage(self.model.parameters())
        self.warmup = LinearWarmup(
            p.learning_rate, p.learning_rate * math.sqrt(self.shares), p.warmup_epochs_per_rank * self.shares
        )
        self.position = Position()
        self.states: list[State] = []
        self.switched: int | None = None
        self.resumed: int | None = None

    def run(self) -> None:
        """Train until the goal or the last epoch and report the result. Raises DivergedError on NaN."""
        if self.p.resume:
            self._resume(Path(self.p.resume))
        self.world.barrier()
        self.tracker.restart()
        curve: list[dict[str, float]] = []
        while self.position.epoch <= self.p.epochs:
            epoch = self.tracker.epoch = self.position.epoch
            training_loss = self._train_epoch(epoch)
            with self.strategy.consensus():
                self.strategy.check_replicas()
                with self.tracker.section("validation"), self.average.applied():
                    values = self.evaluate(self.valid)
            self._switch(values["loss"], epoch)
            self._report_epoch(epoch, training_loss, values)
            curve.append(
                {"epoch": epoch, "seconds": self.tracker.snapshot().wall, "train_loss": training_loss, **values}
            )
            self.position.epoch, self.position.in_epoch = epoch + 1, 0
            if self.goal.observe(values["Perplexity"], epoch, self.tracker):
                break
        with self.strategy.consensus(), self.average.applied():
            test = self.evaluate(self.test)
        self.report.phase("finished")
        self.report.result(self.tracker, self.goal, self._details(curve, test))
        self.strategy.close()

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.p.learning_rate, weight_decay=self.p.weight_decay, fused=True
        )

    def _train_epoch(self, epoch: int) -> float:
        """One epoch, or the rest of it; returns the mean cross-entropy of the words trained on."""
        p, tracker = self.p, self.tracker
        lengths = sequence_lengths(
            len(self.words),
            p.sequence_length,
            p.least_sequence_length,
            p.short_sequence_share,
            self.contract.seed,
            epoch,
        )
        done = self.position.in_epoch
        if not done:
            self.states = [self.model.initial_state(p.batch_size) for _ in self.groups]
        start = sum(lengths[:done])
        self.model.train()
        self.report.phase("training", epoch=epoch, epochs=p.epochs)
        recent, whole = TrainingLoss(), Mean("loss")
        for step, length in enumerate(lengths[done:], done + 1):
            rate = self._rate(epoch - 1 + (step - 1) / len(lengths)) * length / p.sequence_length
            with tracker.step(samples=length * p.batch_size * self.shares):
                loss = self._step(start, length, rate)
            start += length
            self.position.in_epoch, self.position.total = step, self.position.total + 1
            with tracker.section("metrics"):
                recent.add(loss, length)
                whole.add_mean(loss, length)
                if step % p.report_every == 0 or step == len(lengths):
                    value = recent.collect(self.world, epoch, step)
                    self.report.metric("train_loss", value, epoch=epoch, step=self.position.total)
            self.report.step(step, len(lengths), epoch=epoch, epochs=p.epochs)
            if p.checkpoint_every and self.position.total % p.checkpoint_every == 0:
                with self.strategy.consensus():
                    self._save()
        return collect(self.world, [whole])["loss"]

    def _step(self, start: int, length: int, rate: float) -> Tensor:
        """One update on the words start ... start + length of every stream; returns this rank's mean cross-entropy."""
        section = self.tracker.section
        losses = []
        self.update.begin(terms=self.shares, passes=len(self.groups))
        for group, words in enumerate(self.groups):
            # Masks depend on the group's place among all groups, not on the rank that happens to hold it.
            torch.manual_seed(derive(self.contract.seed, "dropout", self.position.total, self._first_group + group))
            with self.update.in_pass(last=group == len(self.groups) - 1):
                with section("forward"), self.precision.autocast():
                    raw, dropped, self.states[group] = self.model(words[start : start + length], self.states[group])
                with section("loss"), self.precision.autocast():
                    entropy = self.model.score(dropped, words[start + 1 : start + 1 + length])
                    penalty = regularization(raw, dropped, self.p.activation_penalty, self.p.temporal_penalty)
                self.update.backward(entropy + penalty)
            losses.append(entropy.detach())
        self.update.apply(rate)
        with section("optimizer"):
            self.average.update()
        return torch.stack(losses).mean()

    def evaluate(self, ids: Tensor) -> dict[str, float]:
        """Loss and perplexity of all of `ids`, cut into streams of which every rank takes its share."""
        self.model.eval()
        words = streams(ids, self.p.validation_streams)
        own = shard(self.p.validation_streams, self.world.size, self.world.rank)
        mean, perplexity = Mean("loss"), Perplexity()
        if own:
            words = words[:, own.start : own.stop].to(self.world.device, torch.int64)
            with torch.inference_mode(), self.precision.autocast():
                state = self.model.initial_state(len(own))
                for start in range(0, len(words) - 1, self.p.sequence_length):
                    targets = words[start + 1 : start + 1 + self.p.sequence_length]
                    _, output, state = self.model(words[start : start + len(targets)], state)
                    loss = self.model.score(output, targets)
                    mean.add_mean(loss, targets.numel())
                    perplexity.add_mean(loss, targets.numel())
        return collect(self.world, [mean, perplexity])

    def _rate(self, epochs: float) -> float:
        """Learning rate after `epochs` epochs, for a batch of the base length."""
        if self.average.active and self.p.averaged_learning_rate:
            return self.p.averaged_learning_rate
        return self.warmup(epochs)

    def _switch(self, loss: float, epoch: int) -> None:
        losses = self.position.validation_losses
        losses.append(loss)
        if self.average.active or not should_switch(losses, self.p.switch_patience, self.p.switch_rule):
            return
        self.average.start()
        self.switched = epoch
        self.report.say(f"epoch {epoch}: the validation loss no longer falls; averaged SGD from here on")

    def _own(self, words: Tensor, share: int) -> Tensor:
        columns = slice(share * self.p.batch_size, (share + 1) * self.p.batch_size)
        return words[:, columns].to(self.world.device, torch.int64)

    @property
    def _first_group(self) -> int:
        return self.world.rank * self.p.accumulation

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that goes on from it."""
        return {
            "vocabulary": len(self.model.embedding),
            "network": [self.p.embedding, self.p.hidden, self.p.layers],
            "global_batch": self.words.shape[1],
            "seed": self.contract.seed,
        }

    def _save(self) -> None:
        states = [
            self._all_columns(torch.cat([half[layer][part] for half in self.states], 1))
            for layer, part in self._cells()
        ]
        state = {
            **self._identity(),
            **self.strategy.state_dict(),
            "average": self.average.state_dict(),
            "position": asdict(self.position),
            "switched": self.switched,
            "states": states,
        }
        save_checkpoint(self.world, Path(self.contract.output_dir) / "checkpoint.pt", NAME, state)

    def _resume(self, path: Path) -> None:
        state = load_checkpoint(self.world, path, NAME, self._identity())
        self.strategy.load_state_dict(state)
        self.average.load_state_dict(state["average"])
        self.position = Position(**state["position"])
        self.switched = state["switched"]
        self.resumed = self.position.total
        self.states = [
            [(hidden, cell) for hidden, cell in zip(columns[::2], columns[1::2], strict=True)]
            for group in range(self.p.accumulation)
            for columns in [[self._columns(whole, group) for whole in state["states"]]]
        ]

    def _cells(self) -> list[tuple[int, int]]:
        return [(layer, part) for layer in range(self.p.layers) for part in (0, 1)]

    def _all_columns(self, own: Tensor) -> Tensor:
        """own (1, streams of this rank, W) -> (1, streams of all ranks, W), so that a checkpoint fits any cut."""
        whole = own.new_zeros(1, self.words.shape[1], own.shape[2])
        start = self._first_group * self.p.batch_size
        whole[:, start : start + own.shape[1]] = own
        return self.world.all_reduce(whole)

    def _columns(self, whole: Tensor, group: int) -> Tensor:
        start = (self._first_group + group) * self.p.batch_size
        return whole[:, start : start + self.p.batch_size].to(self.world.device).contiguous()

    def _report_epoch(self, epoch: int, training_loss: float, values: dict[str, float]) -> None:
        seconds = self.tracker.snapshot().wall
        for name, value in values.items():
            self.report.metric(f"val_global_{name}", value, epoch=epoch, seconds=seconds)
        self.report.say(
            f"epoch {epoch}/{self.p.epochs}  loss {training_loss:.4f}  validation loss {values['loss']:.4f}"
            f"  Perplexity {values['Perplexity']:.2f}  {seconds:.1f} s"
        )

    def _details(self, curve: list[dict[str, float]], test: dict[str, float]) -> dict[str, Any]:
        return {
            "parameters": count_parameters(self.model.parameters()),
            "vocabulary": len(self.model.embedding),
            "words_per_epoch": (len(self.words) - 1) * self.words.shape[1],
            "test_perplexity": test["Perplexity"],
            "averaged_from_epoch": self.switched,
            "resumed_at_update": self.resumed,
            "precision": self.precision.used,
            "curve": curve,
            "communication": self.strategy.stats(),
        }
