"""The engine of Slurm clusters: one batch job for each run, with one agent on each of its nodes."""
