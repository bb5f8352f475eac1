from task_images.certify.task import main
from task_images.run import run

run(main)
