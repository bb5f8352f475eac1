"""The tutorial: an ordinary training script (`ordinary`), and the same made a benchmark in ten lines (`benchmark`)."""
