"""ResNet-20 on CIFAR-10 with DistributedDataParallel. Read `task` first."""
