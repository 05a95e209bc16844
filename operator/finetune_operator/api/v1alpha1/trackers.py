"""Experiment trackers of a job: `spec.observability.trackers`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.inputs import SecretKeyRef

# Without user, query and fragment, so that a profile can allow an address by comparing it.
_ADDRESS = Rule(
    "self.matches('^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~-]+)*$')",
    "must be the address of a server, without user, query and final slash; write "
    "https://HOST or https://HOST/PATH",
)
ServerAddress = Annotated[str, _ADDRESS, Field(max_length=512)]


class TrackerType(StrEnum):
    """Kinds of experiment trackers."""

    WANDB = "wandb"
    MLFLOW = "mlflow"


class TrackerSpec(ApiModel):
    """An experiment tracker that gets the curves of the job."""

    type: TrackerType
    """Kind of the tracker: wandb (Weights & Biases) or mlflow."""
    project: Annotated[
        str,
        Rule(
            "self.matches('^[A-Za-z0-9][A-Za-z0-9._-]*$')",
            "must consist of letters, digits, dots, hyphens and underscores; rename it",
        ),
        Field(min_length=1, max_length=128),
    ]
    """Project of W&B or experiment of MLflow; created if it does not exist."""
    entity: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """User or team of W&B; absent means the default of the API key."""
    url: ServerAddress | None = None
    """Address of the server. In a cluster the profile must allow it (allow.trackers); absent means
    https://api.wandb.ai for wandb. The local backend uses WANDB_BASE_URL or MLFLOW_TRACKING_URI."""
    secret_ref: SecretKeyRef | None = None
    """Secret with the API key of W&B, or with a token or USER:PASSWORD for MLflow. The profile must
    allow it (allow.secrets). The local backend uses the variables WANDB_* or MLFLOW_*."""

    cel_rules = (
        Rule(
            "!has(self.entity) || self.type == 'wandb'",
            "has an effect only with type wandb; remove it",
            field="entity",
        ),
    )
