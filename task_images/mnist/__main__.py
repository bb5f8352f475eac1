from task_images.mnist.task import main
from task_images.run import run

run(main)
