from task_images.cifar10_resnet20_tensorflow.task import main
from task_images.run import run

run(main)
