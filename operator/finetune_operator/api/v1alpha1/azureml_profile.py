"""The block `azureml` of a `FineTuneProfile`: an Azure ML workspace and its defaults for jobs."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.topology import AzureMLCompute, AzureMLEnvironment

Guid = Annotated[
    str, Field(pattern="^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", max_length=36)
]
DatastoreName = Annotated[str, Field(pattern="^[A-Za-z0-9_]+$", max_length=255)]
# After a submission without a response, the job is searched for in the profile's workspace, and the
# next attempt searches its datastore for checkpoints.
_STAYS = Rule(
    "self == oldSelf",
    "cannot change, because jobs of this profile may run there; create another profile",
)
_RESERVED = ("AZUREML_", "FINETUNE_", "MLFLOW_")


class JobIdentityType(StrEnum):
    """Identity with which a job accesses datastores, and pulls from registries."""

    MANAGED = "managed"
    AML_TOKEN = "amlToken"


class JobIdentity(ApiModel):
    """Identity with which a job on the compute accesses datastores and registries."""

    type: JobIdentityType = JobIdentityType.MANAGED
    """managed (a managed identity of the compute), or amlToken (Azure ML acts on behalf of the
    job)."""
    client_id: Guid | None = None
    """Client id of the managed identity, if the compute has several."""

    cel_rules = (
        Rule(
            "!has(self.clientId) || self.type == 'managed'",
            "has no effect with type amlToken; remove it",
            field="clientId",
        ),
    )


class AzureMLSettings(ApiModel):
    """An Azure ML workspace, and the defaults of its jobs."""

    subscription_id: Annotated[Guid, _STAYS]
    """Azure subscription of the workspace."""
    resource_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9._()-]+$", max_length=90), _STAYS]
    """Resource group of the workspace."""
    workspace: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=33), _STAYS]
    """Azure ML workspace."""
    client_id: Guid | None = None
    """Client id of the identity with which the operator calls Azure; absent means the operator's
    own identity. Jobs never receive it."""
    compute: AzureMLCompute | None = None
    """Compute of jobs that name none; absent means that each job must name one, or serverless."""
    environment: AzureMLEnvironment
    """Environment of jobs that name none: an image that contains the trainer."""
    datastore: Annotated[DatastoreName, _STAYS] = "workspaceblobstore"
    """Datastore of checkpoints and trained models without a URI; each job has a folder named after
    its uid."""
    identity: JobIdentity | None = None
    """Identity of the jobs; absent leaves it to Azure ML."""
    shared_memory: Annotated[str, Field(pattern="^[1-9][0-9]*[kmg]$", max_length=16)] = "16g"
    """Size of /dev/shm, such as 64g. The Azure ML default of 2g is too small for NCCL and several
    ranks."""
    env: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = (
        Field({})
    )
    """Environment variables of every job. They must not hold secrets, because everyone with read
    access to the job in Azure ML can read them."""

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
