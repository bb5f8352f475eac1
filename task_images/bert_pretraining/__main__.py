from task_images.bert_pretraining.task import main
from task_images.harness.entry import run

run(main)
