"""The stable interface for custom tasks. Everything else in `task_images` may change at any time.

run, Contract, emit          entry point of a rank; the contract's variables; events
training_session, read_parameters   the ranks of a run as a `World` and a `Reporter`; parameters as a dataclass
TrainingSettings, CudaSettings, CheckpointSettings   shared parameters; a Settings class imports them from parameters,
                             without torch
ArrayData, Batch, Data       data as batches of inputs and targets
Trainer, Samples             the trainer, and its work on such batches, with their validation
Work, Update, PassLoss       any other work: its updates of one or several passes, and what a pass computes
Plan, Unit                   how long to train; the unit of throughput
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

from task_images.clock import Tracker
from task_images.contract import Contract, DivergedError, EnvironmentUnfitError, TaskError, TaskUsageError, emit
from task_images.data import ArrayData, Batch, Data, generator, seed_all
from task_images.methods.base import Bsp, prepare_method
from task_images.metrics import F1, Dice, Mean, Metric, Perplexity, TopK
from task_images.parameters import CheckpointSettings, CudaSettings, TrainingSettings, read_parameters
from task_images.prepare import load_validation
from task_images.report import DataIdentity, GoalWatch, Reporter, compare_data, made_up, training_session
from task_images.run import run
from task_images.schedules import Constant, Cosine, MultiStep, PerEpoch, PerUpdate, Plateau, Schedule
from task_images.train import PassLoss, Plan, Precision, Samples, Trainer, Unit, Update, Work
from task_images.translation.bleu import Bleu, corpus_bleu
from task_images.world import World
