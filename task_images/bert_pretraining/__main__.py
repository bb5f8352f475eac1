from task_images.bert_pretraining.task import main
from task_images.run import run

run(main)
