from task_images.run import run
from task_images.wikitext2_awd_lstm.task import main

run(main)
