from task_images.harness.entry import run
from task_images.mnist.task import main

run(main)
