"""Check that a release works; `helm test` runs it with the address of the release's Service."""

import json
import sys
import time
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import urlopen

SECONDS = 60  # a new leader takes over when the Lease of the old one expires


def main(address: str, seconds: float = SECONDS) -> int:
    """Wait for a replica that leads; return 0, or print the last finding and return 1."""
    end, said = time.monotonic() + seconds, ""
    while True:
        found = look(address)  # the Service may choose another replica each time
        if found != said:
            said = found
            print(found, flush=True)
        if found.startswith("works"):
            return 0
        if time.monotonic() > end:
            return 1
        time.sleep(0.5)


def look(address: str) -> str:
    """Return a sentence about one replica; it begins with `works` if the replica works."""
    try:
        is_ready, text = ask(f"{address}/readyz")
        if not is_ready:
            return f"a replica is not Ready: {text}"
        state = json.loads(text)
        _, metrics = ask(f"{address}/metrics")
    except (OSError, HTTPException, ValueError) as error:
        return (
            f"{address} does not answer ({error}); why no replica is Ready: kubectl describe pods"
        )
    if not state["leading"]:
        return "a replica is Ready and waits for the Lease"
    if "# TYPE finetune_" not in metrics:
        return "a replica is Ready and leads, but its metrics are not the operator's"
    return f"works: a replica is Ready and leads, and {state['queue']} jobs are in its queue"


def ask(url: str) -> tuple[bool, str]:
    """Return whether the response has a status below 400, and its text."""
    try:
        with urlopen(url, timeout=5) as answer:
            return True, answer.read().decode()
    except HTTPError as refusal:
        return False, refusal.read().decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:])))
