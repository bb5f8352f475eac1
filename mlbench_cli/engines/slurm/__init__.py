"""The engine of Slurm clusters: one batch job for each run, with one supervisor on each of its nodes."""
