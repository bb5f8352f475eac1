"""Decoder pretraining, from a minute on one core to the sizes by which clusters are judged."""
