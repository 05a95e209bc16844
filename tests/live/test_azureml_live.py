"""A live workspace of Azure ML: what only Azure can show. It costs a few minutes of one node.

    FINETUNE_LIVE_AZUREML_PROFILE=FILE python -m pytest tests/live

The profile names the workspace, a compute and an environment that has `python`; jobs are created as
whoever is logged in, or as the profile's clientId. What is found is printed, and written to the
file that FINETUNE_LIVE_AZUREML_FACTS names: compare it with docs/tested.md.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.backends.azureml.names import SCHEMA, workspace_id
from finetune_operator.backends.azureml.sdk import RefusedError, Sdk, credential, translated_errors
from finetune_operator.cli.target import profiles_of

PROFILE = os.environ.get("FINETUNE_LIVE_AZUREML_PROFILE", "")
FACTS = os.environ.get("FINETUNE_LIVE_AZUREML_FACTS", "")
WAIT_SECONDS = float(os.environ.get("FINETUNE_LIVE_AZUREML_SECONDS", "1800"))
ENDED = ("Completed", "Failed", "Canceled")
HOLDS = (
    "trap 'echo heard SIGTERM; exit 75' TERM; env | cut -d= -f1 | sort; echo holding; "
    "for i in $(seq 600); do sleep 1; done"
)

pytestmark = [
    pytest.mark.skipif(
        not PROFILE, reason="FINETUNE_LIVE_AZUREML_PROFILE names no profile of a live workspace"
    ),
    pytest.mark.timeout(2 * WAIT_SECONDS),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*experimental"),
]


@pytest.fixture(scope="module")
def facts() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    yield found
    print(json.dumps(found, indent=2))
    if FACTS:
        Path(FACTS).write_text(json.dumps(found, indent=2) + "\n")


class Live:
    """The workspace of the profile, asked by the code of the backend."""

    def __init__(self) -> None:
        (profile,) = profiles_of(None, Path(PROFILE)).values()
        assert profile.spec.azureml is not None
        self.settings = profile.spec.azureml
        who = credential(os.environ, self.settings.client_id, lambda is_write: None)
        self.sdk = Sdk(workspace_id(self.settings), who, lambda is_write: None)

    def job(self, command: str) -> dict[str, Any]:
        return {
            "$schema": SCHEMA,
            "type": "command",
            "name": f"finetune-live-{uuid.uuid4()}",
            "experiment_name": "finetune-live",
            "command": command,
            "environment": self.settings.environment,
            "compute": f"azureml:{self.settings.compute}",
            "resources": {"instance_count": 1},
        }

    def status(self, name: str) -> str:
        status = self.sdk.ml.jobs.get(name).status
        return str(getattr(status, "value", status))  # a word that the SDK does not know is plain

    def data_plane(self) -> str:
        found = self.sdk.ml.workspaces.get(self.settings.workspace)
        base: str = json.loads(self.sdk.read(found.discovery_url))["api"]
        return base.rstrip("/")


def wait_until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not check():
        assert time.monotonic() < end, f"not within {WAIT_SECONDS:.0f} s"
        time.sleep(min(5.0, WAIT_SECONDS / 100))


def answer_of(call: Callable[[], Any]) -> dict[str, Any]:
    """Return what became of a request."""
    try:
        with translated_errors():
            call()
    except RefusedError as error:
        return {"status": error.status, "message": str(error)}
    return {"status": 200, "message": ""}


def test_a_job_holds_its_name_is_read_by_range_stopped_by_a_tag_and_cancelled(
    facts: dict[str, Any],
) -> None:
    live = Live()
    made = live.job(HOLDS)
    name = made["name"]
    live.sdk.create(made)
    try:
        facts["the same PUT again"] = answer_of(lambda: live.sdk.create(made))
        facts["another PUT of the name"] = answer_of(
            lambda: live.sdk.create({**made, "command": "echo other"})
        )
        assert facts["another PUT of the name"]["status"] != 200

        states: list[str] = []

        def runs() -> bool:
            state = live.status(name)
            if state not in states[-1:]:
                states.append(state)
            return state in ("Running", *ENDED)

        wait_until(runs)
        facts["states until it runs"] = states
        base, workspace = live.data_plane(), workspace_id(live.settings)
        url = f"{base}/history/v1.0{workspace}/runs/{name}/details"

        def log_files() -> dict[str, str]:
            found: dict[str, str] = live.sdk.send("GET", url).get("logFiles") or {}
            return found

        def log_of_user() -> str:
            urls = [one for path, one in log_files().items() if path.startswith("user_logs/")]
            return live.sdk.read(urls[0]).decode() if urls else ""

        wait_until(lambda: "holding" in log_of_user())
        facts["log files"] = sorted(log_files())
        facts["variables"] = log_of_user().splitlines()[:-1]
        (first, *_) = [one for path, one in log_files().items() if path.startswith("user_logs/")]
        facts["bytes 2 to 4 of a log"] = len(live.sdk.read(first, 2, 3))

        mlflow = f"{base}/mlflow/v2.0{workspace}/api/2.0/mlflow/runs"
        tag = {"run_id": name, "key": "finetune.live", "value": "heard"}
        live.sdk.send("POST", f"{mlflow}/set-tag", body=tag)
        run = live.sdk.send("GET", f"{mlflow}/get", {"run_id": name})["run"]
        facts["MLflow's word for Running"] = run["info"]["status"]
        tags = {one["key"]: one["value"] for one in run["data"].get("tags", [])}
        facts["runs/get tells a tag"] = tags.get("finetune.live") == "heard"
        facts["the job tells the tag of its run"] = "finetune.live" in (
            live.sdk.ml.jobs.get(name).tags or {}
        )
    finally:
        facts["cancel"] = answer_of(lambda: live.sdk.ml.jobs.begin_cancel(name, polling=False))
        started = time.monotonic()
        wait_until(lambda: live.status(name) in ENDED)
    facts["seconds from cancel to the end"] = round(time.monotonic() - started)
    facts["state after the cancel"] = live.status(name)
    details = live.sdk.send("GET", url)
    facts["error after the cancel"] = details.get("error")
    facts["a cancel sends SIGTERM"] = "heard SIGTERM" in log_of_user()
    facts["cancel of what has ended"] = answer_of(
        lambda: live.sdk.ml.jobs.begin_cancel(name, polling=False)
    )


def test_a_job_that_fails_tells_its_exit_code(facts: dict[str, Any]) -> None:
    live = Live()
    made = live.job("python -c 'raise SystemExit(75)'")
    live.sdk.create(made)
    wait_until(lambda: live.status(made["name"]) in ENDED)
    url = f"{live.data_plane()}/history/v1.0{workspace_id(live.settings)}/runs/{made['name']}"
    facts["error of exit code 75"] = live.sdk.send("GET", f"{url}/details").get("error")
    assert live.status(made["name"]) == "Failed"
