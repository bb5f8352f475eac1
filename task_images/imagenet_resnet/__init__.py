"""ResNet-50 on ImageNet, and its relatives: synchronous SGD with large batches, linear scaling and warm-up."""
