"""What all tasks share, each thing once. A task is a page: read its `task.py`, then the piece you wonder about here.

public       what tasks of other people may rely on

entry        from the contract's variables to `main(contract)` to an exit code; errors: what can go wrong, by exit code
parameters   MLBENCH_PARAMETERS -> the task's frozen dataclass; settings: those that tasks share
session      the beginning and the end of a training around its data and its model
throughput   speed alone, in timed blocks; peak: FLOPs, and what the device could do
distributed  `open_world`: rendezvous, device, threads; World: rank, size and the few collectives bookkeeping needs
seeds        streams of random numbers: equal on all ranks where they must be, different where they must be
partition    who trains on what: every sample once, equally many steps for every rank; data: batches from arrays
images       batches of images loaded ahead in threads; buffers: their memory, used again; datasets: archives fetched
             and checked; cache: data converted once per machine and mapped; progress: how far that is; identity:
             which data they are
loop         the loop from first step to goal: epochs, validation, goal, budget, checkpoints, throughput, reports
training     `Trainer`, that loop in torch; updates: what it asks of a task's batches; precision: number formats;
             losses: the training loss and the guard against NaN; array_checkpoint: checkpoints without torch
classification  what image classifications share on the way from model and data to the result; speed: faster ways to
             compute the same
tracker      where the time goes: sections whose categories add up to the wall time, on all ranks
timeline     the spans of a few updates, and of the communication beside them
goals        full and light threshold, figures up to each; metrics: sums over the whole data set, and the NaN guard
schedules    learning rates; replicas: broadcast, averaged buffers, the check that all ranks hold the same model
report       events for the tool and lines for people; environment: by which code and on what machine a rank runs
models       networks that more than one task trains

How gradients travel is in task_images/comm: `base.Strategy` is the interface, `allreduce` the synchronous method.
"""
