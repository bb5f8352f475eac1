"""End an AKS cluster from within, once its time has come. Run by the CronJob of `providers.aks.end_timer`.

Standard library only, any Python 3.9+. The pod's own token is exchanged for one of the managed identity, which may
delete the cluster's resource group. The request is repeated by the next run of the CronJob until the group, and this
pod with it, is gone.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

AUTHORITY = os.environ.get("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.com")
ENDPOINT = os.environ.get("MLBENCH_AZURE_ENDPOINT", "https://management.azure.com")
SCOPE = "https://management.azure.com/.default"
ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
SECONDS = 30


def get_token() -> str:
    with open(os.environ["AZURE_FEDERATED_TOKEN_FILE"]) as file:
        assertion = file.read()
    form = {
        "grant_type": "client_credentials",
        "client_id": os.environ["AZURE_CLIENT_ID"],
        "client_assertion_type": ASSERTION,
        "client_assertion": assertion,
        "scope": SCOPE,
    }
    url = f"{AUTHORITY.rstrip('/')}/{os.environ['AZURE_TENANT_ID']}/oauth2/v2.0/token"
    request = urllib.request.Request(url, urllib.parse.urlencode(form).encode())
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        document: dict[str, str] = json.load(answer)
        return document["access_token"]


def main() -> int:
    left = int(os.environ["MLBENCH_EXPIRES"]) - time.time()
    if left > 0:
        print(f"{left:.0f} s are left")
        return 0
    url = f"{ENDPOINT}{os.environ['MLBENCH_GROUP_PATH']}?api-version=2021-04-01"
    try:
        headers = {"Authorization": f"Bearer {get_token()}"}
        request = urllib.request.Request(url, headers=headers, method="DELETE")
        with urllib.request.urlopen(request, timeout=SECONDS):
            print("Azure deletes the cluster")
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read(2000).decode('utf-8', 'replace')}", file=sys.stderr)
        return 0 if error.code in (404, 409) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
