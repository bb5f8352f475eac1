from task_images.harness.entry import run
from task_images.imagenet_resnet.task import main

run(main)
