"""What it runs on: `spec.topology`, `spec.capacity` and `spec.backend`."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.placeholders import ONLY_KNOWN
from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.transitions import NEVER_CHANGES

Name = Annotated[str, Field(min_length=1, max_length=253)]
Image = Annotated[str, Field(min_length=1, max_length=512)]
NumNodes = Annotated[int, Field(ge=1, le=4096)]


class Rdma(StrEnum):
    """Whether InfiniBand is used between nodes."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class Placement(StrEnum):
    """How nodes are placed."""

    PACK = "pack"
    SPREAD = "spread"


class Capacity(StrEnum):
    """What kind of machines to use."""

    ON_DEMAND = "onDemand"
    SPOT = "spot"
    SPOT_PREFERRED = "spotPreferred"


class TopologySpec(ApiModel):
    """Nodes, GPUs and processes; world size = nodes x processesPerNode."""

    nodes: NumNodes = 1
    """Nodes that train together."""
    min_nodes: NumNodes | None = None
    """Fewest nodes an elastic job goes on with."""
    max_nodes: NumNodes | None = None
    """Most nodes an elastic job grows to."""
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs of each node; 0 trains on the CPU."""
    processes_per_node: Annotated[int, Field(ge=1, le=256)] | None = None
    """Ranks of each node; absent means gpusPerNode, or 1 on the CPU. May differ from gpusPerNode
    only on the CPU."""
    instance_type: Name | None = None
    """Azure VM size, such as Standard_ND96isr_H100_v5."""
    rdma: Rdma = Rdma.AUTO
    """InfiniBand between nodes: none, auto or required."""
    placement: Placement = Placement.PACK
    """pack keeps nodes close to each other, spread apart."""

    cel_rules = (
        Rule(
            "self.gpusPerNode == 0 || !has(self.processesPerNode) || "
            "self.processesPerNode == self.gpusPerNode",
            "may differ from gpusPerNode only on the CPU (gpusPerNode: 0); remove it",
            field="processesPerNode",
        ),
        Rule(
            "!has(self.minNodes) || self.minNodes <= self.nodes",
            "must be at most nodes",
            field="minNodes",
        ),
        Rule(
            "!has(self.maxNodes) || self.maxNodes >= self.nodes",
            "must be at least nodes",
            field="maxNodes",
        ),
    )


class AksSpec(ApiModel):
    """Settings of the aks backend."""

    profile: Name = "default"
    """FineTuneProfile that says which image, volumes and node pools to use."""
    service_account_name: Name | None = None
    """Service account of the pods, of those that the profile allows; absent means the profile's."""
    image: Image | None = None
    """Image of the trainer, of those that the profile allows; absent means the profile's."""


class AzureMLSpec(ApiModel):
    """Settings of the azureml backend."""

    subscription_id: Annotated[str, Field(min_length=1, max_length=64)]
    """Azure subscription."""
    resource_group: Annotated[str, Field(min_length=1, max_length=90)]
    """Resource group of the workspace."""
    workspace: Annotated[str, Field(min_length=1, max_length=260)]
    """Azure ML workspace."""
    compute: Name
    """Compute target that runs the job."""
    environment: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Environment, azureml:NAME:VERSION."""
    experiment: Name | None = None
    """Experiment the job is listed under; absent means the job's namespace."""


class LocalSpec(ApiModel):
    """Settings of the local backend: this machine."""

    run_directory: (
        Annotated[
            str,
            Field(min_length=1, max_length=2048),
            Rule("!self.startsWith('file:')", "is a path, not a URI; leave out file://"),
            ONLY_KNOWN,
        ]
        | None
    ) = None
    """Folder of everything the run writes; relative to the manifest. Absent means
    runs/NAMESPACE/NAME beside the manifest. {namespace} and {name} stand for the job's own."""
    threads_per_process: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of each rank; absent shares the machine's cores evenly."""


class BackendSpec(ApiModel):
    """What runs it."""

    type: Annotated[
        str, Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63), NEVER_CHANGES
    ] = "aks"
    """aks, azureml, local, or the name of an installed plugin."""
    aks: AksSpec | None = None
    """Settings of the aks backend."""
    azureml: AzureMLSpec | None = None
    """Settings of the azureml backend."""
    local: LocalSpec | None = None
    """Settings of the local backend."""

    cel_rules = (
        *(
            Rule(
                f"!has(self.{block}) || self.type == '{block}'",
                "has no effect with another backend type; remove it",
                field=block,
            )
            for block in ("aks", "azureml", "local")
        ),
        Rule(
            "self.type != 'azureml' || has(self.azureml)",
            "needs the block azureml beside it, which names the workspace and the compute",
            field="type",
        ),
    )
