from task_images.gpt_pretraining.task import main
from task_images.run import run

run(main)
