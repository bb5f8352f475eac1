"""Logistic regression on epsilon. Read `task` first."""
