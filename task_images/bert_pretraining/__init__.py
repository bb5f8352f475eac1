"""BERT pretraining as defined in 2018, for comparison with the communication benchmarks that used it."""
