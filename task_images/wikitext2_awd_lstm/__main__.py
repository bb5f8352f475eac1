from task_images.harness.entry import run
from task_images.wikitext2_awd_lstm.task import main

run(main)
