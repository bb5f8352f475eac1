"""ResNet-20 on CIFAR-10 with torch's DistributedDataParallel, as most people train; not the official benchmark."""
