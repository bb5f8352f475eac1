from task_images.run import run
from task_images.wmt16_gnmt.task import main

run(main)
