"""Plans for machine types that are newer than the tables, and for those of MLBench 3: GPUs, price, number of warnings.

The GPUs come from the answers of the fakes, which are recalled or read in public sources (docs/development).
The fake clouds tell no prices, so a user without an account sees the same. The price is that of one worker.
Prints a table; the exit code is 1 if a plan has other GPUs than the type, sees none, or tells neither a price nor why
there is none.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ZONE = "us-east-1a"
Row = tuple[str, str | None, int]  # options of create-cluster after the cloud, GPU, GPUs of a machine


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.contract.providers.test_newest_machines import EKS_TYPES
    from tests.fakes.aws_server import AwsServer
    from tests.fakes.azure_web import AzureDouble
    from tests.fakes.gke import Google

    eks: list[Row] = [(f"-t {name} --zone {ZONE}", gpu, gpus) for name, gpu, gpus in EKS_TYPES]
    eks.append((f"-t t2.medium --zone {ZONE}", None, 0))
    gke: list[Row] = [
        ("-t n1-standard-4", None, 0),
        ("-t n1-standard-4 --gpu-type t4 -g 1", "nvidia-tesla-t4", 1),
        ("-t a4-highgpu-8g --spot", "nvidia-b200", 8),
        ("-t a4x-highgpu-4g --spot", "nvidia-gb200", 4),
        ("-t a4x-maxgpu-4g-metal --spot", "nvidia-gb300", 4),
    ]
    aks: list[Row] = [
        ("-t Standard_NC144lds_xl_RTXPRO6000BSE_v6 --gpu-type rtx-pro-6000", "rtx-pro-6000", 1),
        ("-t Standard_NC288ds_xl_RTXPRO6000BSE_v6 --gpu-type rtx-pro-6000", "rtx-pro-6000", 2),
        ("-t Standard_ND128isr_NDR_GB200_v6 --gpu-type gb200 --region eastus2", "gb200", 4),
        ("-t Standard_ND128isr_GB300_v6 --gpu-type gb300", "gb300", 4),
    ]
    wrong = 0
    print(f"{'cloud':<6}{'machine':<40}{'GPUs':<26}{'USD/h':>8}{'warnings':>10}  price unknown, because")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLBENCH_HOME"] = str(Path(folder) / "home")
        aws, google, azure = AwsServer(), Google(Path(folder) / "google"), AzureDouble(Path(folder) / "azure")
        try:
            aws.rules(
                offered=[[words.split()[1], ZONE] for words, *_ in eks],
                quotas=dict.fromkeys(("L-DB2E81BA", "L-417A185B", "L-C4BD4855", "L-3819A6DF"), 9999.0),
            )
            azure.reset()
            os.environ.update({**aws.environment("plans"), **google.environment, **azure.environment})
            for cloud, rows in (("eks", eks), ("gke", gke), ("aks", aks)):
                wrong += sum(not _plan(cloud, row) for row in rows)
        finally:
            aws.stop()
            google.close()
            azure.close()
    print(f"{len(eks + gke + aks)} types, {wrong} planned wrong")
    return 1 if wrong else 0


def _plan(cloud: str, row: Row) -> bool:
    """Plan one machine and print its line. Whether it has the GPUs that it should have."""
    from mlbench_cli.app import run

    words, gpu, gpus = row
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["create-cluster", cloud, "1", "new", *words.split(), "--dry-run", "-o", "json"])
    machine = words.split()[1]
    if code:
        said = json.loads(out.getvalue())["error"]["message"]
        print(f"{cloud:<6}{machine:<40}{'refused':<26}{'':>8}  {said}")
        return False
    planned = json.loads(out.getvalue())
    details, plan = planned["cluster"]["details"], planned["plan"]
    found = (details["gpu"], details["gpus_per_node"])
    lines = [line for line in plan["lines"] if line["what"].startswith((f"worker {machine}", "GPU "))]
    unknown = [line for line in lines if line["price_per_hour"] is None]
    shown = "unknown" if unknown else f"{sum(line['price_per_hour'] for line in lines):.2f}"
    warnings = len(plan["warnings"])
    what = f"{found[1]} × {found[0]}" if found[1] else "none"
    reasons = "; ".join(f"{line['what']}: {line['why_unknown']}" for line in unknown)
    print(f"{cloud:<6}{machine:<40}{what:<26}{shown:>8}{warnings:>10}  {reasons}")
    return found == (gpu, gpus) and all(line["why_unknown"] for line in unknown)


if __name__ == "__main__":
    raise SystemExit(main())
