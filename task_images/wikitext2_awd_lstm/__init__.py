"""Benchmark 3a: AWD-LSTM on WikiText-2 (Merity, Keskar, Socher: Regularizing and Optimizing LSTM Language Models)."""
