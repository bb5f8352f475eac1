"""What a goal takes in time and money: samples to goal over the batch size, speeds of machines, and the plan.

samples   how many samples a goal needs at another batch size, with the basis of that figure
machines  the machine types of a plan: what they compute, how they are joined, where each figure is from
plan      candidates, their predictions, and which of them are worth a look

Nothing here reads the store or asks a cloud: callers hand over archives' documents and prices.
"""
