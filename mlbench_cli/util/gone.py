"""What the third edition had and is gone, and what to use instead. Standard library only."""

OPTIONS = {
    "--calibrate": "Leave it out: mlbench predict takes any finished training.",
    "--dashboard-url": "ssh to the machine of the dashboard and run the command there, or use its REST API (/api/v1).",
    "-u": "ssh to the machine of the dashboard and run the command there, or use its REST API (/api/v1).",
    "--for": "mlbench predict RUN --on MACHINE --workers N",
    "--advise": "mlbench predict RUN RUN: runs with several methods get rows of their own.",
    "--topology": "mlbench predict RUN --workers N --network RATE,DELAY",
    "--network-of": "mlbench predict RUN RUN: the network that the runs probed is the default.",
    "--search": "mlbench run NAME 1 --task TASK --set hold_out=0.2 --matrix set.KEY=V1,V2, then run the best",
    "--search-budget": "mlbench run NAME 1 --task TASK --set hold_out=0.2 --set epochs=N --matrix set.KEY=V1,V2",
    "--servers-on": "Leave it out: parameter servers run on the hosts of the workers.",
    "--server-cpus": "--num-cpus, which also applies to parameter servers",
    "--max-hours": "--timeout limits each run; Ctrl-C stops an experiment, and the same command resumes it.",
    "--checkpoint-copy": "Leave it out: the loss of a machine ends the run. --on-failure restart covers lost ranks.",
    "--max-cost": "--timeout limits each run; Ctrl-C stops an experiment, and the same command resumes it.",
    "--pod-label": "--pod-patch FILE with   metadata: {labels: {KEY: VALUE}}",
    "--pod-annotation": "--pod-patch FILE with   metadata: {annotations: {KEY: VALUE}}",
    "--priority-class": "--pod-patch FILE with   spec: {priorityClassName: NAME}",
    "--scheduler": "--pod-patch FILE with   spec: {schedulerName: NAME}",
    "--policy": "The files providers/gke/policy.json, eks/policy.json and aks/policy.json of mlbench.",
    "--first-day": "docs/how-to/first-cloud-day.md has the commands.",
}
COMMANDS = {
    "plan": "mlbench predict RUN --workers 2,4,8 --on MACHINE",
    "campaign": "mlbench run -f FILE",
    "extend": "Repeat mlbench create-cluster with another --ttl.",
    "pins": "mlbench doctor says which support ends soon.",
    "prices": "mlbench create-cluster CLOUD N NAME --dry-run",
    "kubeconfig": "kind export kubeconfig, gcloud container clusters get-credentials, aws eks update-kubeconfig, or "
    "az aks get-credentials",
    "completion": "mlbench --install-completion, or --show-completion",
}
