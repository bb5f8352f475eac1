"""The code that tasks share. A task fits on a page: read its `task.py` first, then the modules that it uses:

public       the stable interface for custom tasks

entry        runs `main(contract)` with the contract's variables, returns the exit code; errors: failures by exit code
parameters   MLBENCH_PARAMETERS -> the task's frozen dataclass; settings: parameters shared by tasks
session      start and end of a training
throughput   measures speed in timed blocks; peak: FLOPs, and the peak rate of the device
distributed  `open_world`: rendezvous, device, threads; World: rank, size and small collectives for bookkeeping
seeds        streams of random numbers, shared by all ranks or separate per rank
partition    splits samples over ranks: each sample once, the same number of steps on each rank; data: batches from
             arrays
images       batches of images, prefetched by threads; buffers: reuses their memory; datasets: fetches and checks
             archives; cache: data converted once per machine and memory-mapped; progress: of long preparations;
             identity: which data a run used
loop         the training loop: epochs, validation, goal, budget, checkpoints, throughput, reports
training     `Trainer`, the loop in torch; updates: its interface for batches; precision: number formats;
             losses: the training loss and the guard against NaN; array_checkpoint: checkpoints without torch
classification  shared code of image classifications; speed: options that compute the same faster
tracker      measures time by category; categories add up to the wall time
goals        full and light thresholds, figures up to each; metrics: over the whole data set
schedules    learning rates; replicas: broadcast, averaged buffers, the check that all ranks hold the same model
report       events for mlbench and log lines for people; environment: facts about code and machine
models       networks shared by tasks

Gradient exchange is in task_images/methods.
"""
