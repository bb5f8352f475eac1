from task_images.epsilon_logistic_regression.task import main
from task_images.harness.entry import run

run(main)
