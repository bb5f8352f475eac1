"""What tasks of other people may rely on. Everything else in `task_images` may change at any time.

run, Contract, emit          the way in and out of a rank; events
opening, read_parameters     the ranks of a run as a `World` and a `Reporter`; parameters as a dataclass
TrainingSettings, CudaSettings, UpdateSettings   the parameter groups `training`, `cuda`, `updates`
ArrayData, Batch, Data, Batches, Update          data as batches, or as updates of several passes
Trainer, make_sample_trainer, PassLoss, Work     the trainer; for batches of inputs and targets, or for any pass
Plan, Unit, Protocol         how long to train, what throughput is counted in, and its protocol
GoalWatch, Metric, Mean, TopK, Perplexity, F1    goals, and metrics over the whole data set
Tracker                      where the time goes
Schedule, PerUpdate, PerEpoch, Plateau, Constant, Cosine, MultiStep   learning rates
GradientAllReduce, prepare_strategy              how gradients travel; `--method` replaces it
Precision                    number formats
DataIdentity, made_up, compare_data              which data a run trained on
seed_all, generator          random numbers that do not depend on the number of ranks
TaskError, TaskUsageError, EnvironmentUnfitError, DivergedError       failures by exit code
"""

__all__ = [
    *("Batch", "Batches", "Constant", "Contract", "Cosine", "CudaSettings", "Data", "DataIdentity", "DivergedError"),
    *("EnvironmentUnfitError", "F1", "GoalWatch", "GradientAllReduce", "ArrayData", "Mean", "Metric", "MultiStep"),
    *("PassLoss", "PerEpoch", "PerUpdate", "Perplexity", "Plan", "Plateau", "Precision", "Protocol", "Reporter"),
    *("Schedule", "TaskError", "TaskUsageError", "TopK", "Tracker", "Trainer", "TrainingSettings", "Unit", "Update"),
    *("UpdateSettings", "Work", "World", "compare_data", "emit", "generator", "made_up", "make_sample_trainer"),
    *("opening", "prepare_strategy", "read_parameters", "run", "seed_all"),
]
