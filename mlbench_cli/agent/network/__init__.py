"""The shaped network of a local run: a network namespace per worker, joined by links of a given rate and delay."""
