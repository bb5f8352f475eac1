from task_images.allreduce.task import main
from task_images.run import run

run(main)
