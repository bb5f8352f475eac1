from task_images.harness.entry import run
from task_images.wmt16_gnmt.train import main

run(main)
