"""Realistic bugs, one diff each: a line that explains it, a line with the tests that should find it, and the change."""
