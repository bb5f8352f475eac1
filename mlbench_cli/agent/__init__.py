"""The agent runs beside the ranks: it starts, samples and stops them, records the evidence, and serves its folder.

`agent` supervises the ranks of one machine and `node` joins it with those of the run's other machines; `serve` answers
requests about files and processes, and `channel` is its client. What runs beside ranks uses the standard library only.
"""
