"""ResNet-20 on CIFAR-10, the official image classification: synchronous SGD, warm-up of log2 k epochs, plateau."""
