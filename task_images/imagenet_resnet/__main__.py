from task_images.imagenet_resnet.task import main
from task_images.run import run

run(main)
