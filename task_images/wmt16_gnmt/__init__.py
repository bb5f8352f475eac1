"""Benchmark 4a: GNMT on WMT16 English-German (Wu et al.: Google's Neural Machine Translation System)."""
