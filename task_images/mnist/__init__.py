"""The tutorial: an ordinary training script (`ordinary`), the same made a benchmark in ten lines (`benchmark`), and its
network as a task of the catalog (`task`)."""
