from task_images.digits_resnet.task import main
from task_images.run import run

run(main)
