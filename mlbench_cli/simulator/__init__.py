"""How long a training step takes on a network that is not there: events and cost models, without torch or numpy.

gloo          gloo's ring all-reduce, message by message
collectives   cost of a collective: gloo, the textbook's ring, NCCL, two levels of links
workload      what a step computes and sends
step          the step under a method: plans, order, barriers
models        tensors of the published models
published     the seeds' tables, predicted and held against
calibration   what a run measured of itself
predict       from a calibration to other sizes, networks and methods
"""
