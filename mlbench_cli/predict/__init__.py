"""Predictions of time and cost to a goal: samples to goal by batch size, speeds of machines, and plans.

samples   the samples that a goal needs at another batch size, and the basis of the figure
machines  machine types with their compute speed, network and sources
plan      candidates, their predictions and the best ones

Nothing here reads the store or queries a cloud: callers pass documents of archives and prices.
"""
