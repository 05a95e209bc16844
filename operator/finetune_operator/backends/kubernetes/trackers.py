"""Trackers of a job in its pods: addresses and Secrets that the profile allows. Pure.

A job's author may not be allowed to read Secrets or to reach internal servers, so both the address
and the Secret must be in the profile's `allow`. The Secret is a file, which only the process of the
trackers reads.
"""

from collections.abc import Iterator
from typing import Any

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.api.v1alpha1.trackers import TrackerSpec, TrackerType
from finetune_operator.backends.allow_rules import refused
from finetune_trainer.config import TrackerConfig

Json = dict[str, Any]

FIELD = "spec.observability.trackers"
WANDB_SERVER = "https://api.wandb.ai"
_FOLDER = "/etc/finetune-trackers"
_FILE = "credentials"
_READABLE_BY_GROUP = 0o440


def problems(job: FineTuneJob, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    """Yield the addresses and Secrets that the profile does not allow."""
    allowed = profile.allow.trackers or ()
    for index, one in enumerate(job.spec.observability.trackers or ()):
        path, url = f"{FIELD}[{index}]", _address(one)
        if url is None:
            yield Problem(f"{path}.url", "is missing; set the address of the MLflow server")
        elif url not in allowed:
            listed = f" (allowed: {', '.join(allowed)})" if allowed else ""
            text = (
                f"{url} is a tracking server that the profile does not allow{listed}; name "
                "another, or have it added to allow.trackers of the profile"
            )
            yield Problem(f"{path}.url", text)
        if one.secret_ref is not None:
            where = f"{path}.secretRef.name"
            yield from refused(where, "a secret", one.secret_ref.name, profile.allow.secrets)


def configs(job: FineTuneJob) -> tuple[TrackerConfig, ...]:
    """Return the trackers for the trainer."""
    return tuple(
        TrackerConfig(
            type=one.type.value,
            project=one.project,
            entity=one.entity,
            url=_address(one),
            credentials_path=f"{_folder(one)}/{_FILE}" if one.secret_ref else None,
        )
        for one in job.spec.observability.trackers or ()
    )


def volumes(job: FineTuneJob) -> list[Json]:
    """Return the volumes of the Secrets; a missing Secret costs a warning, not the pod's start."""
    return [
        {
            "name": _volume(one),
            "secret": {
                "secretName": one.secret_ref.name,
                "items": [{"key": one.secret_ref.key, "path": _FILE}],
                "defaultMode": _READABLE_BY_GROUP,
                "optional": True,
            },
        }
        for one in job.spec.observability.trackers or ()
        if one.secret_ref is not None
    ]


def mounts(job: FineTuneJob) -> list[Json]:
    """Return the mounts of these volumes."""
    return [
        {"name": _volume(one), "mountPath": _folder(one), "readOnly": True}
        for one in job.spec.observability.trackers or ()
        if one.secret_ref is not None
    ]


def _address(tracker: TrackerSpec) -> str | None:
    default = WANDB_SERVER if tracker.type is TrackerType.WANDB else None
    return tracker.url or default


def _volume(tracker: TrackerSpec) -> str:
    # No volume of a job's podTemplate may be named so.
    return f"claim-of-{tracker.type.value}"


def _folder(tracker: TrackerSpec) -> str:
    return f"{_FOLDER}/{tracker.type.value}"
