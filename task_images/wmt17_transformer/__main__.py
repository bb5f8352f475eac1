from task_images.run import run
from task_images.wmt17_transformer.task import main

run(main)
