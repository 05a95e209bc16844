"""Turn a plan and a profile into one Azure ML command job for `az ml job create -f`. Pure.

`AzureMLBackend.render` calls it, also for `ftctl render`. `compute_checks` calls it to measure the
length of the trainer's configuration.
"""

from typing import Any

from finetune_operator.api.v1alpha1.azureml_profile import JobIdentity
from finetune_operator.api.v1alpha1.topology import Capacity
from finetune_operator.backends.azureml import names, places
from finetune_operator.backends.azureml.names import JobProfile, azureml_of
from finetune_operator.backends.azureml.places import Places
from finetune_operator.backends.base import Attempt, Request
from finetune_operator.planner.plan import Plan
from finetune_operator.planner.train_config import derive_train_config
from finetune_trainer.config import ENV_TRAIN_CONFIG, pack

Json = dict[str, Any]


def render(plan: Plan, profile: JobProfile, attempt: Attempt) -> Request:
    """Return the command job that `submit` creates."""
    job = plan.job
    name = names.job_name(job, attempt.number)
    return Request(
        backend=names.BACKEND,
        job_uid=job.metadata.uid,
        attempt=attempt.number,
        name=names.resource_id(profile.settings, name),
        objects=(_command_job(plan, profile, name, attempt.number),),
    )


def packed_config(plan: Plan, profile: JobProfile, attempt: int) -> str:
    """Return the trainer's configuration as the job contains it."""
    locations = places.locations(
        plan.job,
        _places(plan, profile),
        allow_foreign=profile.spec.allow.foreign_checkpoints,
        listing_lag_seconds=profile.spec.listing_lag_seconds,
    )
    return pack(derive_train_config(plan, attempt, locations))


def _places(plan: Plan, profile: JobProfile) -> Places:
    return places.places_of(plan.job, profile.settings.datastore)


def _command_job(plan: Plan, profile: JobProfile, name: str, attempt: int) -> Json:
    job, settings, mine = plan.job, profile.settings, azureml_of(plan.job.spec)
    mounts = _places(plan, profile)
    command: Json = {
        "$schema": names.SCHEMA,
        "type": "command",
        "name": name,
        "display_name": f"{job.metadata.name}-{attempt}",
        "experiment_name": mine.experiment or job.metadata.namespace,
        "tags": names.tags(job, attempt),
        "command": f"{names.COMMAND} {mounts.arguments}",
        "environment": profile.environment_of(job),
        "environment_variables": {
            "PYTHONSAFEPATH": "1",  # Python imports no module from the image's working directory
            **settings.env,
            ENV_TRAIN_CONFIG: packed_config(plan, profile, attempt),
        },
    }
    if (compute := profile.compute_of(job)) is not None:
        command["compute"] = f"azureml:{compute}"
    command["resources"] = _resources(plan, settings.shared_memory)
    if plan.nodes > 1:
        # The distribution starts the main process of each node, which starts the ranks, and passes
        # the rendezvous address. A single node does not need it.
        command["distribution"] = {"type": "pytorch", "process_count_per_instance": 1}
    if queue := _queue_settings(plan):
        command["queue_settings"] = queue
    if settings.identity is not None:
        command["identity"] = _identity(settings.identity)
    if mounts.inputs:
        command["inputs"] = {
            key: {"type": one.type.value, "path": one.path, "mode": "ro_mount"}
            for key, one in mounts.inputs.items()
        }
    command["outputs"] = {
        # Mode upload would upload checkpoints only after the job has ended.
        key: {"type": places.InputType.FOLDER.value, "path": uri, "mode": "rw_mount"}
        for key, uri in mounts.outputs.items()
    }
    return command


def _resources(plan: Plan, shared_memory: str) -> Json:
    resources: Json = {"instance_count": plan.nodes, "shm_size": shared_memory}
    if (size := plan.job.spec.topology.instance_type) is not None:
        resources["instance_type"] = size
    return resources


def _queue_settings(plan: Plan) -> Json:
    mine, queue = azureml_of(plan.job.spec), Json()
    # For a named compute, spot is a property of the compute: the job cannot request it.
    if mine.serverless and plan.job.spec.capacity is Capacity.SPOT:
        queue["job_tier"] = "spot"
    if mine.priority is not None:
        queue["priority"] = mine.priority.value
    return queue


def _identity(identity: JobIdentity) -> Json:
    rendered = {"type": {"managed": "managed", "amlToken": "aml_token"}[identity.type]}
    if identity.client_id is not None:
        rendered["client_id"] = identity.client_id
    return rendered
