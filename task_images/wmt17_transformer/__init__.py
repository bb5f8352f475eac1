"""Benchmark 4b: the big Transformer on WMT17 English-German (Vaswani et al.: Attention Is All You Need)."""
