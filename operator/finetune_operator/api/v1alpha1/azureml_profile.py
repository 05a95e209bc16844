"""What a `FineTuneProfile` says of an Azure ML workspace: its block `azureml`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.topology import AzureMLCompute, AzureMLEnvironment

Guid = Annotated[
    str, Field(pattern="^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", max_length=36)
]
DatastoreName = Annotated[str, Field(pattern="^[A-Za-z0-9_]+$", max_length=255)]
# A submit that was not answered is searched for in the workspace that the profile names, and the
# next attempt looks for checkpoints in its datastore.
_STAYS = Rule(
    "self == oldSelf",
    "cannot change, because jobs of this profile may run there; create another profile",
)
_RESERVED = ("AZUREML_", "FINETUNE_", "MLFLOW_")


class JobIdentityType(StrEnum):
    """As whom a job reads and writes datastores, and pulls from registries."""

    MANAGED = "managed"
    AML_TOKEN = "amlToken"


class JobIdentity(ApiModel):
    """As whom a job on the compute reads and writes."""

    type: JobIdentityType = JobIdentityType.MANAGED
    """managed (a managed identity of the compute), or amlToken (Azure ML acts for the job)."""
    client_id: Guid | None = None
    """Which managed identity, where the compute has several."""

    cel_rules = (
        Rule(
            "!has(self.clientId) || self.type == 'managed'",
            "has no effect with type amlToken; remove it",
            field="clientId",
        ),
    )


class AzureMLSettings(ApiModel):
    """An Azure ML workspace, and how jobs run in it."""

    subscription_id: Annotated[Guid, _STAYS]
    """Azure subscription of the workspace."""
    resource_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9._()-]+$", max_length=90), _STAYS]
    """Resource group of the workspace."""
    workspace: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=33), _STAYS]
    """Azure ML workspace."""
    client_id: Guid | None = None
    """Client id of the identity with which the operator asks Azure; absent means the one that it
    has by itself. Jobs never get it."""
    compute: AzureMLCompute | None = None
    """Compute of jobs that name none; absent means that each names one, or serverless."""
    environment: AzureMLEnvironment
    """Environment of jobs that name none: an image that has the trainer."""
    datastore: Annotated[DatastoreName, _STAYS] = "workspaceblobstore"
    """Datastore of checkpoints and trained models without a URI, each job's in a folder named by
    its uid."""
    identity: JobIdentity | None = None
    """As whom jobs read and write; absent leaves it to Azure ML."""
    shared_memory: Annotated[str, Field(pattern="^[1-9][0-9]*[kmg]$", max_length=16)] = "16g"
    """Size of /dev/shm, such as 64g; the 2g that Azure ML has as a default is too little for NCCL
    and several ranks."""
    env: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = (
        Field({})
    )
    """Environment variables of every job. No secrets: whoever may read the job in Azure ML reads
    them."""

    cel_rules = (
        Rule(
            "!has(self.env) || !self.env.exists(name, "
            + " || ".join(f"name.startsWith('{one}')" for one in _RESERVED)
            + ")",
            f"sets a variable reserved for Azure ML and the operator ({', '.join(_RESERVED)}); "
            "remove it",
            field="env",
        ),
    )
