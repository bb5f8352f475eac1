"""Shared code of the two translation tasks: parallel data, batches, beam search, BLEU and training."""
