"""ResNet-20 v2 on CIFAR-10 with TensorFlow 2. Read `task` first."""
