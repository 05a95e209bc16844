"""`allow` of a `FineTuneProfile`: who may use it, and what their jobs may name."""

from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1.topology import NumNodes

Patterns = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=256)
]
Quantity = Annotated[
    str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$", max_length=32)
]


class Allowances(ApiModel):
    """Who may use the profile, and what their jobs may name. `*` and `?` stand for any text."""

    namespaces: Patterns = Field([])
    """Namespaces whose jobs may use the profile."""
    service_accounts: Patterns = Field([])
    """Service accounts a job may choose, besides the profile's own."""
    secrets: Patterns = Field([])
    """Secrets a job may name, for the hub token, for env or to pull its image."""
    claims: Patterns = Field([])
    """PersistentVolumeClaims of its namespace that a job may name."""
    volumes: Patterns = Field([])
    """Volumes of the profile that a job may name, all of which it may read, and write unless they
    are readOnly."""
    images: Patterns = Field([])
    """Images a job may choose, besides the profile's own."""
    priority_classes: Patterns = Field([])
    """Kueue's WorkloadPriorityClasses a job may wait with."""
    env: Patterns = Field([])
    """Variables that a job's podTemplate may set. Some can load code or send a token elsewhere;
    those that the operator or the profile sets are refused in any case."""
    metadata: Patterns = Field([])
    """Keys of labels and annotations that a job's podTemplate may set; Services, policies and
    injectors of others may act on them."""
    max_nodes: NumNodes = 1
    """Most nodes of a job."""
    max_gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 8
    """Most GPUs of each node."""
    max_resources: Annotated[dict[str, Quantity], Field(max_length=3)] = Field({})
    """Most cpu, memory and ephemeral-storage that a job's podTemplate may ask for in each pod; what
    is not listed it may not ask for, nor what the profile sets itself."""
    foreign_checkpoints: bool = False
    """Whether checkpoint.resumeFrom may name a checkpoint that another job has written, as far as
    its volume may be named; else such a job ends with exit code 78."""
    scheduling: bool = False
    """Whether a job's podTemplate may set nodeSelector, tolerations and affinity."""
    computes: Patterns = Field([])
    """Azure ML computes a job may choose, besides the profile's own."""
    serverless: bool = False
    """Whether a job may run on serverless compute."""
    sizes: Patterns = Field([])
    """VM sizes of serverless compute, and instance types of Kubernetes compute, that a job may name
    as topology.instanceType."""
    environments: Patterns = Field([])
    """Azure ML environments a job may choose, besides the profile's own."""
    datastores: Patterns = Field([])
    """Datastores of the workspace in which a job may name any path, to read and to write."""
