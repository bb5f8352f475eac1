"""End a GKE cluster from within, once its time has come. Run by the CronJob of `providers.gke.end_timer`.

Standard library only, any Python 3.9+. The token is that of the pod's own service account, which Google's IAM knows.
The request is repeated by the next run of the CronJob until the cluster, and this pod with it, is gone.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

METADATA = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
TOKEN = f"http://{METADATA}/computeMetadata/v1/instance/service-accounts/default/token"
ENDPOINT = os.environ.get("MLBENCH_GKE_REST_ENDPOINT", "https://container.googleapis.com")
SECONDS = 30


def send(url: str, headers: dict[str, str], method: str = "GET") -> dict[str, str]:
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        document: dict[str, str] = json.load(answer)
        return document


def main() -> int:
    left = int(os.environ["MLBENCH_EXPIRES"]) - time.time()
    if left > 0:
        print(f"{left:.0f} s are left")
        return 0
    token = send(TOKEN, {"Metadata-Flavor": "Google"})["access_token"]
    url = f"{ENDPOINT}/v1/{os.environ['MLBENCH_CLUSTER_PATH']}"
    try:
        send(url, {"Authorization": f"Bearer {token}"}, "DELETE")
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read(2000).decode('utf-8', 'replace')}", file=sys.stderr)
        return 0 if error.code == 404 else 1
    print("Google deletes the cluster")
    return 0


if __name__ == "__main__":
    sys.exit(main())
