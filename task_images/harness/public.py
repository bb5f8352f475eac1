"""The stable interface for custom tasks. Everything else in `task_images` may change at any time.

run, Contract, emit          entry point of a rank; the contract's variables; events
training_session, read_parameters   the ranks of a run as a `World` and a `Reporter`; parameters as a dataclass
TrainingSettings, CudaSettings, UpdateSettings   shared parameters; a Settings class imports them from harness.settings,
                             without torch
ArrayData, Batch, Data, Batches, Update          data as batches, or as updates of several passes
Trainer, make_sample_trainer, PassLoss, Work     the trainer; for batches of inputs and targets, or for any pass
Plan, Unit, Protocol         how long to train; the unit of throughput and its protocol
GoalWatch, Metric, Mean, TopK, Perplexity, F1, Dice   goals, and metrics over the whole data set
corpus_bleu, Bleu            BLEU as in the goals of the translation tasks, by sacrebleu
load_validation              the official validation set of a catalog task
Tracker                      time by category
Schedule, PerUpdate, PerEpoch, Plateau, Constant, Cosine, MultiStep   learning rates
Bsp, prepare_method          gradient exchange, replaced by `--method`
Precision                    number formats
DataIdentity, made_up, compare_data              identity of a run's data
seed_all, generator          random numbers that do not depend on the number of ranks
TaskError, TaskUsageError, EnvironmentUnfitError, DivergedError       failures by exit code
"""

from task_images.contract import Contract, emit
from task_images.harness.data import ArrayData, Batch, Data
from task_images.harness.distributed import World
from task_images.harness.entry import run
from task_images.harness.errors import DivergedError, EnvironmentUnfitError, TaskError, TaskUsageError
from task_images.harness.goals import GoalWatch
from task_images.harness.identity import DataIdentity, compare_data, made_up
from task_images.harness.loop import Plan, Unit
from task_images.harness.metrics import F1, Dice, Mean, Metric, Perplexity, TopK
from task_images.harness.parameters import read_parameters
from task_images.harness.precision import Precision
from task_images.harness.report import Reporter
from task_images.harness.schedules import Constant, Cosine, MultiStep, PerEpoch, PerUpdate, Plateau, Schedule
from task_images.harness.seeds import generator, seed_all
from task_images.harness.session import training_session
from task_images.harness.settings import CudaSettings, Protocol, TrainingSettings, UpdateSettings
from task_images.harness.tracker import Tracker
from task_images.harness.training import PassLoss, Trainer, Work, make_sample_trainer
from task_images.harness.translation.bleu import Bleu, corpus_bleu
from task_images.harness.updates import Batches, Update
from task_images.harness.validation import load_validation
from task_images.methods.allreduce import Bsp
from task_images.methods.check import prepare_method

opening = training_session  # its earlier name, which custom tasks may use
