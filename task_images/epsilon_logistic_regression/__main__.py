from task_images.epsilon_logistic_regression.task import main
from task_images.run import run

run(main)
