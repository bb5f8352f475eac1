from task_images.harness.entry import run
from task_images.wmt17_transformer.task import main

run(main)
