"""`allow` of a `FineTuneProfile`: its namespaces, and the resources that their jobs may name."""

from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1.topology import NumNodes
from finetune_operator.api.v1alpha1.trackers import ServerAddress

Patterns = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=256)
]
Quantity = Annotated[
    str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$", max_length=32)
]


class Allowances(ApiModel):
    """Namespaces that may use the profile, and names that jobs may use; * and ? are wildcards."""

    namespaces: Patterns = Field([])
    """Namespaces whose jobs may use the profile."""
    service_accounts: Patterns = Field([])
    """Service accounts a job may choose, besides the profile's own."""
    secrets: Patterns = Field([])
    """Secrets a job may name, for the hub token, for env, for trackers or to pull its image."""
    trackers: Annotated[list[ServerAddress], Field(max_length=64)] | None = None
    """Addresses of tracking servers that jobs may send curves and the content of their secretRef
    to, such as https://api.wandb.ai; without wildcards. Absent means none."""
    claims: Patterns = Field([])
    """PersistentVolumeClaims of the job's namespace that the job may name."""
    volumes: Patterns = Field([])
    """Volumes of the profile that a job may name. The job may read all of each volume, or of its
    subPath, and write to it unless it is readOnly."""
    images: Patterns = Field([])
    """Images a job may choose, besides the profile's own."""
    priority_classes: Patterns = Field([])
    """Kueue WorkloadPriorityClasses that a job may use."""
    env: Patterns = Field([])
    """Environment variables that a job's podTemplate may set. Some variables can load code or send
    a token elsewhere. Variables that the operator or the profile sets are always refused."""
    metadata: Patterns = Field([])
    """Keys of labels and annotations that a job's podTemplate may set. Services, policies and
    injectors may act on them."""
    max_nodes: NumNodes = 1
    """Maximum nodes of a job."""
    max_gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 8
    """Maximum GPUs per node."""
    max_resources: Annotated[dict[str, Quantity], Field(max_length=3)] = Field({})
    """Maximum cpu, memory and ephemeral-storage that a job's podTemplate may request per pod.
    Resources that are not listed, or that the profile sets, cannot be requested."""
    max_empty_dir: Quantity | None = None
    """Maximum sizeLimit of each emptyDir of a job's podTemplate, which must then set one. Absent
    means no limit but the memory and ephemeral-storage of the pod."""
    max_termination_grace_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """Maximum deadlines.terminationGraceSeconds of a job. Absent means no limit."""
    require_queue: bool | None = None
    """Whether a job must name a queue (spec.queue), so that Kueue admits it; absent means
    false."""
    foreign_checkpoints: bool = False
    """Whether checkpoint.resumeFrom may name a checkpoint that another job has written, on a volume
    that the job may name. Otherwise such a job terminates with exit code 78."""
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
    models: Patterns | None = None
    """Models of the workspace a job may name. Absent means any."""
    registries: Patterns | None = None
    """Azure ML registries whose models a job may name. Absent means any."""
    experiments: Patterns | None = None
    """Experiments a job may choose, besides the experiment of its namespace. Absent means any."""
