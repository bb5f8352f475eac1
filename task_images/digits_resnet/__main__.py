from task_images.digits_resnet.task import main
from task_images.harness.entry import run

run(main)
