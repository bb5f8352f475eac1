from task_images.allreduce.task import main
from task_images.harness.entry import run

run(main)
