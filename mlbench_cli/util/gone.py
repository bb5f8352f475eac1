"""What the third edition had and is gone, and what to use instead. Standard library only."""

OPTIONS = {
    "--search": "mlbench run NAME 1 --task TASK --set hold_out=0.2 --matrix set.KEY=V1,V2, then run the best",
    "--search-budget": "mlbench run NAME 1 --task TASK --set hold_out=0.2 --set epochs=N --matrix set.KEY=V1,V2",
    "--servers-on": "Leave it out: parameter servers run on the hosts of the workers.",
    "--server-cpus": "--num-cpus, which also applies to parameter servers",
    "--max-hours": "--timeout limits each run; Ctrl-C stops an experiment, and the same command resumes it.",
    "--checkpoint-copy": "Leave it out: the loss of a machine ends the run. --on-failure restart covers lost ranks.",
    "--max-cost": "--timeout limits each run; Ctrl-C stops an experiment, and the same command resumes it.",
}
COMMANDS = {
    "campaign": "mlbench run -f FILE",
    "completion": "mlbench --install-completion, or --show-completion",
}
