"""Requests of a job that its profile does not allow or its compute does not support. Pure.

`AzureMLBackend.validate` calls it before an attempt is opened; `computes` calls it with Azure's
responses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as of_dataclass
from importlib.util import find_spec

from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.unbuilt import check_fields, only, unset
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.topology import Capacity
from finetune_operator.backends import allow_rules
from finetune_operator.backends.allow_rules import refused
from finetune_operator.backends.azureml import places
from finetune_operator.backends.azureml.names import FIELD, PROFILE_FIELD, JobProfile, azureml_of
from finetune_operator.backends.azureml.places import BadUriError
from finetune_operator.backends.azureml.render import packed_config
from finetune_operator.backends.azureml.sdk import INSTALL
from finetune_operator.planner import uris
from finetune_operator.planner.plan import make_plan

MAX_CONFIG_BYTES = 120 * 1024
"""Linux limits a variable to 128 KiB, including its name."""

SIZE_FIELD = "spec.topology.instanceType"

NO_EFFECT = (
    unset(
        "model.tokenSecretRef",
        "remove it, because everyone who can read the job in Azure ML would see it; copy the data "
        f"to {places.DATASTORE_FORM}",
    ),
    only("topology.rdma", "auto"),
    only("topology.placement", "pack"),
    only("restartPolicy.restartsInPlace", 0),
    unset("queue", "remove it, and set backend.azureml.priority to order jobs"),
    unset("podTemplate"),
    unset("observability.trackers", "remove it; Azure ML has the curves in its own MLflow"),
)


@dataclass(frozen=True)
class Compute:
    """A compute of a workspace.

    Attributes:
        kind: Name of its kind in the SDK.
        location: Region.
        size: VM size of its nodes, if all have the same.
        is_spot: Whether its nodes may be preempted.
        max_nodes: Maximum number of nodes; None if not reported.
        gpus: GPUs per node by instance type, if a job can choose the type.
        default_type: Instance type of a job that names none.
    """

    kind: str
    location: str
    size: str = ""
    is_spot: bool = False
    max_nodes: int | None = None
    gpus: Mapping[str, int] = of_dataclass(default_factory=dict)
    default_type: str = ""


def missing_library() -> list[Problem]:
    """Return the package to install before a job can be submitted, without importing it."""
    for name in ("azure.ai.ml", "azure.identity"):
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:  # not even its parent package
            is_there = False
        if not is_there:
            text = f"azureml needs the Azure SDK, and {name} is not installed; {INSTALL}"
            return [Problem("spec.backend.type", text)]
    return []


def impossible(job: FineTuneJob) -> list[Problem]:
    """Return the problems that would exist with any profile."""
    found = check_fields(job.to_object(), NO_EFFECT, "has no effect on Azure ML")
    fields = (Problem(show_path(one.path), one.message) for one in found)
    return [*_uris(job), *fields, *_serverless(job)]


def forbidden(job: FineTuneJob, profile: JobProfile) -> list[Problem]:
    """Return the requests that this profile does not allow or offer."""
    allow = profile.spec.allow
    return allow_rules.foreign(job, PROFILE_FIELD, profile.name, allow) or [
        *allow_rules.forbidden(job, profile.name, allow),
        *_compute(job, profile),
        *_names(job, profile),
        *_datastores(job, profile),
        *allow_rules.unless_resumed(job, _models_and_experiment(job, profile)),
        *allow_rules.unless_resumed(job, _roots(job)),
        *_length(job, profile),
    ]


def on_serverless(job: FineTuneJob, gpus: Mapping[str, int]) -> Iterator[Problem]:
    """Check the job's requests against the GPUs of each VM size of the location."""
    size = job.spec.topology.instance_type or ""
    if size.lower() not in gpus:
        yield Problem(SIZE_FIELD, f"{size} is not a VM size of the workspace's location")
    else:
        yield from _too_few_gpus(job, gpus[size.lower()], size)


def on_cluster(
    job: FineTuneJob, name: str, compute: Compute, gpus: Mapping[str, int]
) -> Iterator[Problem]:
    """Check the job's requests against a cluster of Azure ML."""
    topology, capacity = job.spec.topology, job.spec.capacity
    size = topology.instance_type
    if size is not None and size.lower() != compute.size.lower():
        text = (
            f"{size} is not the size of compute {name}, which is {compute.size}; remove the field"
        )
        yield Problem(SIZE_FIELD, text)
    if compute.max_nodes is not None and topology.nodes > compute.max_nodes:
        text = f"{topology.nodes} is more than compute {name} may have: {compute.max_nodes}"
        yield Problem("spec.topology.nodes", text)
    yield from _too_few_gpus(job, gpus.get(compute.size.lower()), f"compute {name}")
    if capacity is Capacity.SPOT and not compute.is_spot:
        text = f"spot is unavailable on compute {name}, whose nodes are dedicated; use onDemand"
        yield Problem("spec.capacity", text)
    if capacity is Capacity.ON_DEMAND and compute.is_spot:
        text = f"onDemand is unavailable on compute {name}, whose nodes may be preempted; use spot"
        yield Problem("spec.capacity", text)


def on_kubernetes(job: FineTuneJob, name: str, compute: Compute) -> Iterator[Problem]:
    """Check the job's requests against an attached Kubernetes cluster."""
    topology, names = job.spec.topology, ", ".join(sorted(compute.gpus)) or "none"
    size = topology.instance_type
    if size is None:
        if topology.gpus_per_node > (there := compute.gpus.get(compute.default_type, 0)):
            text = (
                f"is missing, and the default instance type of compute {name} has {there} GPUs; "
                f"name an instance type: {names}"
            )
            yield Problem(SIZE_FIELD, text)
    elif size not in compute.gpus:
        text = f"{size} is not an instance type of compute {name}; use {names}"
        yield Problem(SIZE_FIELD, text)
    else:
        yield from _too_few_gpus(job, compute.gpus[size], f"{size} of compute {name}")


def _too_few_gpus(job: FineTuneJob, there: int | None, where: str) -> Iterator[Problem]:
    asked = job.spec.topology.gpus_per_node
    if there is not None and asked > there:
        text = f"{asked} is more than a node of {where} has: {there}; name another compute or size"
        yield Problem("spec.topology.gpusPerNode", text)


def _uris(job: FineTuneJob) -> Iterator[Problem]:
    inputs = uris.inputs_of(job)
    for field, uri in (inputs | uris.starts_of(job) | uris.outputs_of(job)).items():
        if field in inputs and uris.is_on_hub(uri):
            if not uris.is_hub_name(uri):
                yield Problem(field, f"{uri} is not a repository of the hub; write hf://ORG/NAME")
            continue
        try:
            places.place_of(field, uri)
        except BadUriError as error:
            yield Problem(field, str(error))


def _serverless(job: FineTuneJob) -> Iterator[Problem]:
    if not azureml_of(job.spec).serverless:
        return
    if job.spec.topology.instance_type is None:
        text = "is missing, and serverless compute needs a VM size; set it"
        yield Problem(SIZE_FIELD, text)
    if job.spec.capacity is Capacity.SPOT_PREFERRED:
        text = "spotPreferred is not possible on serverless compute; use spot or onDemand"
        yield Problem("spec.capacity", text)


def _compute(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    allow = profile.spec.allow
    if azureml_of(job.spec).serverless:
        if not allow.serverless:
            text = (
                f"true is not allowed by profile {profile.name}; name a compute, or get the "
                "profile's allow.serverless set"
            )
            yield Problem(f"{FIELD}.serverless", text)
        return
    compute = profile.compute_of(job)
    if compute is None:
        text = f"is missing, and profile {profile.name} has no default; name one"
        yield Problem(f"{FIELD}.compute", text)
    elif compute != profile.settings.compute:
        yield from refused(f"{FIELD}.compute", "a compute", compute, allow.computes)


def _names(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    allow = profile.spec.allow
    environment, size = profile.environment_of(job), job.spec.topology.instance_type
    if environment != profile.settings.environment:
        path = f"{FIELD}.environment"
        yield from refused(path, "an environment", environment, allow.environments)
    if size is not None:
        yield from refused(SIZE_FIELD, "a size", size, allow.sizes)


def _datastores(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    """Check the datastores that the job names, including the profile's own datastore.

    Other jobs store their checkpoints there, so a job may name a path in it only with permission.
    """
    named = uris.inputs_of(job) | uris.starts_of(job) | uris.outputs_of(job)
    for field, uri in named.items():
        if uris.is_on_hub(uri):
            continue
        datastore = places.place_of(field, uri).datastore
        if datastore is not None:
            yield from refused(field, "a datastore", datastore, profile.spec.allow.datastores)


def _models_and_experiment(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    """Check the models, registries and experiment of the job, if the profile lists any."""
    allow = profile.spec.allow
    for field, uri in (uris.inputs_of(job) | uris.starts_of(job)).items():
        if uris.is_on_hub(uri):
            continue
        place = places.place_of(field, uri)
        if place.model is not None and allow.models is not None:
            yield from refused(field, "a model", place.model, allow.models)
        if place.registry is not None and allow.registries is not None:
            yield from refused(field, "a registry", place.registry, allow.registries)
    experiment = azureml_of(job.spec).experiment
    if experiment not in (None, job.metadata.namespace) and allow.experiments is not None:
        yield from refused(f"{FIELD}.experiment", "an experiment", experiment, allow.experiments)


def _roots(job: FineTuneJob) -> Iterator[Problem]:
    """Refuse the root of a datastore, since no other job could write to the datastore."""
    for field, uri in uris.outputs_of(job).items():
        place = places.place_of(field, uri)
        if not place.path:
            text = (
                f"{uri} is the root of a datastore, which no single job may use; name a folder, "
                f"such as {place.root}{{name}}/{field.split('.')[1]}"
            )
            yield Problem(field, text)


def _length(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    """Check that the trainer's configuration fits into a variable."""
    try:
        plan = make_plan(job)
    except InvalidJobError:
        return  # the planner reports it
    size = len(packed_config(plan, profile, attempt=1))
    if size > MAX_CONFIG_BYTES:
        text = (
            f"makes a configuration of {size} bytes, compressed, and at most {MAX_CONFIG_BYTES} "
            "reach a job of Azure ML; shorten model.chatTemplate, observability.samplePrompts or "
            "the longest list"
        )
        yield Problem("spec", text)
