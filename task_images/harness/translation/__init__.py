"""What the two translation tasks share: parallel data, batches, beam search, BLEU and the training loop."""
