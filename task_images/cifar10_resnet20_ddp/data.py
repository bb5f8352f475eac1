"""The same data as cifar10_resnet20's."""

from task_images.cifar10_resnet20.data import prepare_data

__all__ = ["prepare_data"]
