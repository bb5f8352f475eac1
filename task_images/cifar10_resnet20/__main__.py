from task_images.cifar10_resnet20.task import main
from task_images.run import run

run(main)
