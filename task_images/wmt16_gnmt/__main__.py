from task_images.harness.entry import run
from task_images.wmt16_gnmt.task import main

run(main)
