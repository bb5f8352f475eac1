"""ResNet-20 v2 on CIFAR-10 with TensorFlow 2: the image classification 1a in another framework, without torch."""
