"""What a job asks for that its profile does not allow, or that no job of Azure ML can do. Pure.

`AzureMLBackend.validate` calls it before an attempt is opened. What only Azure can tell is asked at
submission.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.unbuilt import check_fields, only, unset
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.topology import Capacity
from finetune_operator.backends import allowances
from finetune_operator.backends.allowances import refused
from finetune_operator.backends.azureml import places
from finetune_operator.backends.azureml.names import FIELD, PROFILE_FIELD, JobProfile, azureml_of
from finetune_operator.backends.azureml.places import BadUriError
from finetune_operator.backends.azureml.render import packed_config
from finetune_operator.backends.azureml.sdk import INSTALL
from finetune_operator.planner import uris
from finetune_operator.planner.plan import make_plan

MAX_CONFIG_BYTES = 120 * 1024
"""Linux takes 128 KiB for a variable, its name included."""

_NO_EFFECT = (
    unset(
        "model.tokenSecretRef",
        "remove it, as whoever may read the job in Azure ML would read the token; copy what needs "
        f"one to {places.DATASTORE_FORM}",
    ),
    only("topology.rdma", "auto"),
    only("topology.placement", "pack"),
    only("restartPolicy.restartsInPlace", 0),
    unset("queue", "remove it, and set backend.azureml.priority where some jobs go first"),
    unset("podTemplate"),
)


def missing_library() -> list[Problem]:
    """Return what is to be installed before a job can be submitted; imports nothing of it."""
    for name in ("azure.ai.ml", "azure.identity"):
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:  # not even the package above it
            is_there = False
        if not is_there:
            text = f"azureml needs the Azure SDK, and {name} is not installed; {INSTALL}"
            return [Problem("spec.backend.type", text)]
    return []


def impossible(job: FineTuneJob) -> list[Problem]:
    """Return the problems that no profile could solve."""
    found = check_fields(job.to_object(), _NO_EFFECT, "has no effect on Azure ML")
    fields = (Problem(show_path(one.path), one.message) for one in found)
    return [*_uris(job), *fields, *_serverless(job)]


def forbidden(job: FineTuneJob, profile: JobProfile) -> list[Problem]:
    """Return what this profile does not allow or offer."""
    return [
        *allowances.forbidden(job, PROFILE_FIELD, profile.name, profile.spec.allow),
        *_compute(job, profile),
        *_names(job, profile),
        *_datastores(job, profile),
        *_length(job, profile),
    ]


def _uris(job: FineTuneJob) -> Iterator[Problem]:
    inputs = uris.inputs_of(job)
    for field, uri in (inputs | uris.starts_of(job) | uris.outputs_of(job)).items():
        if field in inputs and uris.is_on_hub(uri):
            if not uris.is_hub_name(uri):
                yield Problem(field, f"{uri} names nothing on the hub; write hf://ORG/NAME")
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
        yield Problem("spec.topology.instanceType", text)
    if job.spec.capacity is Capacity.SPOT_PREFERRED:
        text = "spotPreferred is not possible on serverless compute; use spot or onDemand"
        yield Problem("spec.capacity", text)


def _compute(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    allow = profile.spec.allow
    if azureml_of(job.spec).serverless:
        if not allow.serverless:
            text = (
                f"true is not allowed by profile {profile.name}; name a compute, or have the "
                "profile's allow.serverless set"
            )
            yield Problem(f"{FIELD}.serverless", text)
        return
    compute = profile.compute_of(job)
    if compute is None:
        text = f"is missing, and profile {profile.name} has none of its own; name one"
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
        yield from refused("spec.topology.instanceType", "a size", size, allow.sizes)


def _datastores(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    """Check the datastores that the job names, the profile's own among them.

    Other jobs keep their checkpoints there, so naming a path in it is a right of its own.
    """
    named = uris.inputs_of(job) | uris.starts_of(job) | uris.outputs_of(job)
    for field, uri in named.items():
        if uris.is_on_hub(uri):
            continue
        datastore = places.place_of(field, uri).datastore
        if datastore is not None:
            yield from refused(field, "a datastore", datastore, profile.spec.allow.datastores)


def _length(job: FineTuneJob, profile: JobProfile) -> Iterator[Problem]:
    """Check that the trainer's configuration fits into a variable."""
    try:
        plan = make_plan(job)
    except InvalidJobError:
        return  # whoever plans the job says so
    size = len(packed_config(plan, profile, attempt=1))
    if size > MAX_CONFIG_BYTES:
        text = (
            f"makes a configuration of {size} bytes, compressed, and at most {MAX_CONFIG_BYTES} "
            "reach a job of Azure ML; shorten model.chatTemplate, observability.samplePrompts or "
            "the longest list"
        )
        yield Problem("spec", text)
