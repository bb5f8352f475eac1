"""Training of AWD-LSTM: truncated backpropagation through time over parallel streams, SGD, then averaged SGD."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from task_images.contract import Contract
from task_images.errors import EnvironmentUnfitError
from task_images.goals import GoalWatch
from task_images.loop import Plan, Unit, check_finite
from task_images.methods.allreduce import Bsp
from task_images.methods.check import prepare_method
from task_images.parameters import read_parameters
from task_images.precision import Precision, refuse_bf16_lstm
from task_images.report import Reporter
from task_images.schedules import Constant, PerUpdate
from task_images.seeds import seed_all
from task_images.train import Trainer, count_parameters
from task_images.wikitext2_awd_lstm import Settings
from task_images.wikitext2_awd_lstm.averaging import Average
from task_images.wikitext2_awd_lstm.data import Corpus, read_corpus
from task_images.wikitext2_awd_lstm.model import AwdLstm, Dropout
from task_images.wikitext2_awd_lstm.sample import write_sample
from task_images.wikitext2_awd_lstm.streams import Evaluation, Streams
from task_images.world import World, training_session

NAME = "wikitext2_awd_lstm"
OWN_TEXT = "Python language reference (pydoc_data.topics)"


def main(contract: Contract) -> None:
    """Load the text, cut it into streams, and train AWD-LSTM to the perplexity goal."""
    parameters = read_parameters(Settings, contract.parameters)
    own_text = parameters.data == "python-topics"
    with training_session(contract, OWN_TEXT if own_text else "WikiText-2") as (world, report):
        corpus = load(parameters, contract)
        identity = corpus.identify()
        report.data_identity(
            replace(identity, official=False, reason=f"another text: {OWN_TEXT}") if own_text else identity
        )
        seed_all(contract.seed)
        train(world, report, parameters, corpus)


def load(parameters: Settings, contract: Contract) -> Corpus:
    """The corpus chosen by the parameters. Raises EnvironmentUnfitError if it is missing."""
    if parameters.data == "python-topics":
        with tempfile.TemporaryDirectory() as folder:
            write_sample(Path(folder))
            return read_corpus(Path(folder))
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            "no folder with WikiText-2 was given",
            "Run with --data-dir FOLDER, or choose the preset tiny, which includes a text.",
        )
    return read_corpus(Path(contract.data_dir))


def train(world: World, report: Reporter, p: Settings, corpus: Corpus) -> AwdLstm:
    """Train to the goal and report the result; returns the model."""
    dropout = Dropout(p.dropout_embedding, p.dropout_input, p.dropout_hidden, p.dropout_output, p.weight_drop)
    model = AwdLstm(len(corpus.words), p.embedding, p.hidden, p.layers, dropout).to(world.device)
    refuse_bf16_lstm(p.precision, world.device)
    precision = Precision(p.precision, world.device)
    average = Average(model, p.switch_patience, p.switch_rule, report)
    streams = Streams(world, p, model, corpus.train, average)
    evaluate = Evaluation(world, p, model, precision, average)
    Trainer(
        world,
        report,
        streams,
        PerUpdate(Constant(1.0)),  # the batches have the rate
        Plan(
            p.epochs,
            p.budget_seconds,
            loss_every=p.report_every,
            checkpoint_every=p.checkpoint_every,
            resume=p.resume,
            protocol=p.protocol,
        ),
        name=NAME,
        validate=lambda epoch: check_finite(evaluate(corpus.valid), epoch),
        goal=GoalWatch("Perplexity", "<=", p.goal_full, p.goal_light, world.contract.goal),
        details={
            "parameters": count_parameters(model.parameters()),
            "vocabulary": len(corpus.words),
            "words_per_epoch": streams.words_per_epoch,
        },
        closing=lambda: {
            "test_perplexity": evaluate(corpus.test)["Perplexity"],
            "averaged_from_epoch": average.switched,
        },
        states={"average": average, "streams": streams},
        identity={
            "vocabulary": len(corpus.words),
            "network": [p.embedding, p.hidden, p.layers],
            "global_batch": streams.number,
            "seed": world.contract.seed,
        },
        after_update=average.mean.update,
        after_validation=average.observe,
        work=streams,
        model=model,
        make_optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.0, weight_decay=p.weight_decay, fused=True
        ),
        method=prepare_method(world, Bsp),
        precision=precision,
        arithmetic=p,
        unit=Unit("words"),
        clip=p.clip,
    ).run()
    return model
