"""Names and tags of jobs and attempts in Azure ML, and the resources that a job uses. Pure."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError

from finetune_operator.api.v1alpha1.azureml_profile import AzureMLSettings
from finetune_operator.api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.api.v1alpha1.topology import AzureMLSpec
from finetune_operator.backends.profiles import ProfileError, Profiles
from finetune_trainer.config import (
    HEARD_TAG,
    PROGRESS_TAG,
    STOP_TAG,
    ContractModel,
    Heard,
    Progress,
    StopRequest,
)

log = logging.getLogger(__name__)

T = TypeVar("T", bound=ContractModel)

BACKEND = "azureml"
KIND = "AzureMLJob"
UID_TAG, ATTEMPT_TAG, PROFILE_TAG = "finetune.uid", "finetune.attempt", "finetune.profile"
FIELD = "spec.backend.azureml"
PROFILE_FIELD = f"{FIELD}.profile"

SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
COMMAND = "python -P -m finetune_trainer.launch.azureml"
"""The command without the mounts. A second command would need a shell, which does not forward
SIGTERM.
"""


def azureml_of(spec: FineTuneJobSpec) -> AzureMLSpec:
    """Return the job's settings for this backend, or the defaults if the job has none."""
    return spec.backend.azureml or AzureMLSpec()


@dataclass(frozen=True)
class JobProfile:
    """A FineTuneProfile of this backend.

    Attributes:
        name: Its name.
        spec: Its whole spec.
        settings: Its block `azureml`.
    """

    name: str
    spec: FineTuneProfileSpec
    settings: AzureMLSettings

    def compute_of(self, job: FineTuneJob) -> str | None:
        """Return the compute that runs the job; None if serverless or not named."""
        mine = azureml_of(job.spec)
        return None if mine.serverless else mine.compute or self.settings.compute

    def environment_of(self, job: FineTuneJob) -> str:
        """Return the environment that has the trainer."""
        return azureml_of(job.spec).environment or self.settings.environment


def profile_of(job: FineTuneJob, profiles: Profiles) -> JobProfile:
    """Return the job's current profile.

    Raises:
        ProfileError: The profile does not exist, cannot be read, or is for another backend.
    """
    name = azureml_of(job.spec).profile
    spec = profiles.get(name)
    if spec.azureml is None:
        raise ProfileError(f"{name} does not name a workspace; name a profile with azureml")
    return JobProfile(name, spec, spec.azureml)


def job_name(job: FineTuneJob, attempt: int) -> str:
    """Return the name of an attempt, which is unique in the workspace.

    Without a uid, as in `ftctl render`, it consists of the job's name and the attempt's number.
    """
    parts = (job.metadata.name, job.metadata.uid, str(attempt))
    return "-".join(part for part in parts if part)


def workspace_id(settings: AzureMLSettings) -> str:
    """Return Azure's id of the workspace."""
    return (
        f"/subscriptions/{settings.subscription_id}/resourceGroups/{settings.resource_group}"
        f"/providers/Microsoft.MachineLearningServices/workspaces/{settings.workspace}"
    )


def resource_id(settings: AzureMLSettings, name: str) -> str:
    """Return Azure's id of a job of the workspace."""
    return f"{workspace_id(settings)}/jobs/{name}"


def parts_of(resource_id: str) -> tuple[str, str]:
    """Return the workspace's id and the name in the id of a job."""
    workspace, _, name = resource_id.partition("/jobs/")
    return workspace, name


def tags(job: FineTuneJob, attempt: int) -> dict[str, str]:
    """Return the tags that identify an attempt as the job's own."""
    metadata = job.metadata
    values = {
        "finetune.namespace": metadata.namespace,
        "finetune.job": metadata.name,
        UID_TAG: metadata.uid,
        ATTEMPT_TAG: str(attempt),
        PROFILE_TAG: azureml_of(job.spec).profile,
    }
    return {key: value for key, value in values.items() if value}


@dataclass(frozen=True)
class Report:
    """Contents of a run's tags.

    Attributes:
        progress: The last progress of rank 0.
        heard: Last heartbeat of the reporter; None before it checks the stop tag.
        stop_until: Time by which the run must have ended, if the operator has stopped it.
    """

    progress: Progress | None = None
    heard: Heard | None = None
    stop_until: datetime | None = None


NO_REPORT = Report()


def report_of(tags: Mapping[str, str]) -> Report:
    """Parse a run's tags."""
    stop = _read(StopRequest, STOP_TAG, tags)
    return Report(
        progress=_read(Progress, PROGRESS_TAG, tags),
        heard=_read(Heard, HEARD_TAG, tags),
        stop_until=stop.until if stop is not None else None,
    )


def _read(model: type[T], tag: str, tags: Mapping[str, str]) -> T | None:
    if not (text := tags.get(tag)):
        return None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        log.debug("tag not read", extra={"tag": tag, "error": str(error)})
        return None
