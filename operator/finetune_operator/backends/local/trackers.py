"""Trackers of a job on this machine: the user's variables name the server and the credentials.

A manifest may come from someone else, so an address in it never receives the user's credentials
unless the variables name the same address.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.trackers import TrackerType
from finetune_trainer.config import TrackerConfig

_SERVER = {TrackerType.WANDB: "WANDB_BASE_URL", TrackerType.MLFLOW: "MLFLOW_TRACKING_URI"}
_PREFIX = {TrackerType.WANDB: "WANDB_", TrackerType.MLFLOW: "MLFLOW_"}
FIELD = "spec.observability.trackers"


def configs(job: FineTuneJob) -> tuple[TrackerConfig, ...]:
    """Return the trackers for the trainer, which reads the variables."""
    return tuple(
        TrackerConfig(type=one.type.value, project=one.project, entity=one.entity)
        for one in job.spec.observability.trackers or ()
    )


def problems(job: FineTuneJob, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the addresses that the user's variables do not name."""
    for index, one in enumerate(job.spec.observability.trackers or ()):
        path, variable = f"{FIELD}[{index}].url", _SERVER[one.type]
        server = environ.get(variable, "").rstrip("/")
        if one.url is not None and one.url != server:
            text = (
                f"{one.url} is not the server of this machine ({variable}); remove it, or export "
                f"{variable}={one.url}"
            )
            yield Problem(path, text)
        elif one.type is TrackerType.MLFLOW and not _is_http(server):
            text = (
                f"is missing: {variable} is not the address of an MLflow server; export it as "
                "http:// or https://"
            )
            yield Problem(path, text)


def variables(
    config: Mapping[str, Any], node: int, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the user's variables for the trackers in a trainer's configuration, on node 0.

    Only the process of the trackers gets them: the trainer passes them on to no rank.
    """
    trackers = config["telemetry"].get("trackers") or ()
    prefixes = tuple(_PREFIX[TrackerType(one["type"])] for one in trackers)
    if node != 0 or not prefixes:
        return {}
    return {name: text for name, text in environ.items() if name.startswith(prefixes)}


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
