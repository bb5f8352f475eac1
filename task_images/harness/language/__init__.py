"""Pretraining of language models: what gpt_pretraining and bert_pretraining share.

layout       which rank does what (data, replicas, tensor parallel), checked before any process group exists; memory
parallel     a model spread over ranks by that layout: DDP, FSDP2, HSDP, tensor parallel; initial weights; clipping
tokens       text and token files -> fixed windows of tokens, in an order that follows from seed and step alone
program      from the contract to the result: what a task says of itself, in the order that all have
pretraining  the loop: accumulation, one update with the exact mean over tokens, evaluation, checkpoints
speed        peak of the device, tokens per second, model FLOPs utilisation
"""
