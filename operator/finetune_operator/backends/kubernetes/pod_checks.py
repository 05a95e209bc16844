"""Requests of a job that its profile forbids or that the kubernetes backend does not support. Pure.

`KubernetesBackend.validate` calls it before an attempt is opened.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from posixpath import normpath

from finetune_operator.api.metadata import wrong_key, wrong_label_value
from finetune_operator.api.paths import show_path
from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.api.v1alpha1.topology import Rdma
from finetune_operator.backends import allow_rules
from finetune_operator.backends.allow_rules import fits, refused
from finetune_operator.backends.kubernetes import pod_template, scheduling, trackers, volumes
from finetune_operator.backends.kubernetes.attempt_profiles import FIELD, Snapshot, settings_of
from finetune_operator.backends.kubernetes.child_names import RENDEZVOUS_PORT
from finetune_operator.backends.kubernetes.volumes import CLAIM, BadUriError
from finetune_operator.planner import uris

_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def impossible(job: FineTuneJob) -> list[Problem]:
    """Return the problems that would exist with any profile."""
    return [*_uris(job), *_folders(job), *_port(job), *_forms(job), *_pod_metadata(job)]


def forbidden(job: FineTuneJob, profile: Snapshot) -> list[Problem]:
    """Return the requests that this profile does not allow or offer."""
    allow = profile.spec.allow
    return allow_rules.foreign(job, FIELD, profile.name, allow) or [
        *allow_rules.forbidden(job, profile.name, allow),
        *_names(job, profile.spec),
        *_kept(job, profile),
        *_nvme(job, profile.spec),
        *_queue(job, profile.spec),
        *allow_rules.unless_resumed(job, _limits(job, profile)),
        *_nodes(job, profile),
        *_template(job, profile.spec),
        *trackers.problems(job, profile.spec),
    ]


def _uris(job: FineTuneJob) -> Iterator[Problem]:
    inputs = uris.inputs_of(job)
    for path, uri in (inputs | uris.starts_of(job) | uris.outputs_of(job)).items():
        may_be_hub = path in inputs
        if may_be_hub and uris.is_on_hub(uri):
            if not uris.is_hub_name(uri):
                yield Problem(path, f"{uri} is not a repository of the hub; write hf://ORG/NAME")
            continue
        try:
            volumes.claim_path(uri)
        except BadUriError as error:
            is_claim = uri.startswith(CLAIM)
            text = f"{error} or hf://ORG/NAME" if may_be_hub and not is_claim else str(error)
            yield Problem(path, text)


def _folders(job: FineTuneJob) -> Iterator[Problem]:
    spec = job.spec
    if spec.output.uri is None:
        text = "is missing, and a pod's own disk is deleted with the pod; set pvc://CLAIM/PATH"
        yield Problem("spec.output.uri", text)
    if spec.checkpoint.uri is not None:
        return
    if spec.topology.nodes > 1:
        text = "is missing, and the pods of several nodes share no disk; set pvc://CLAIM/PATH"
        yield Problem("spec.checkpoint.uri", text)
    else:
        text = "is missing, so every restart starts over; set pvc://CLAIM/PATH"
        yield Problem("spec.checkpoint.uri", text, Severity.WARNING)


def _port(job: FineTuneJob) -> Iterator[Problem]:
    port = job.spec.observability.metrics_port
    if job.spec.topology.nodes > 1 and port == RENDEZVOUS_PORT:
        text = f"{port} is the rendezvous port of several nodes; use another port"
        yield Problem("spec.observability.metricsPort", text)


def _forms(job: FineTuneJob) -> Iterator[Problem]:
    """Check values that the API server would refuse in the batch Job, without the job's field."""
    spec, token = job.spec, job.spec.model.token_secret_ref
    labels = {"spec.topology.instanceType": spec.topology.instance_type}
    if spec.queue is not None:
        labels["spec.queue.name"] = spec.queue.name
        labels["spec.queue.priorityClass"] = spec.queue.priority_class
    objects = {"spec.backend.kubernetes.serviceAccountName": settings_of(job).service_account_name}
    if token is not None:
        objects["spec.model.tokenSecretRef.name"] = token.name
    for index, one in enumerate(spec.observability.trackers or ()):
        if one.secret_ref is not None:
            objects[f"{trackers.FIELD}[{index}].secretRef.name"] = one.secret_ref.name
    for path, name in labels.items():
        if name is not None and (wrong := wrong_label_value(name)):
            yield Problem(path, wrong)
    for path, name in objects.items():
        if name is not None and not _OBJECT_NAME.fullmatch(name):
            text = (
                f"{name} is not a valid object name; use lower-case letters, digits, hyphens "
                "and dots, with a letter or digit at both ends"
            )
            yield Problem(path, text)


def _pod_metadata(job: FineTuneJob) -> Iterator[Problem]:
    """Check the labels and annotations of the pods; the schema bounds their sizes."""
    if job.spec.pod_template is None:
        return
    metadata, place = job.spec.pod_template.metadata, ("spec", "podTemplate", "metadata")
    for key, value in metadata.labels.items():
        for wrong in (wrong_key(key), wrong_label_value(value)):
            if wrong:
                yield Problem(show_path((*place, "labels", key)), wrong)
    for key in metadata.annotations:
        if wrong := wrong_key(key.lower()):
            yield Problem(show_path((*place, "annotations", key)), wrong)


def _names(job: FineTuneJob, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    settings, allow = settings_of(job), profile.allow
    account = settings.service_account_name
    if account is not None and account != profile.service_account_name:
        path = "spec.backend.kubernetes.serviceAccountName"
        yield from refused(path, "a service account", account, allow.service_accounts)
    if settings.image is not None and settings.image != profile.image:
        yield from refused(
            "spec.backend.kubernetes.image", "an image", settings.image, allow.images
        )
    token = job.spec.model.token_secret_ref
    if token is not None:
        path = "spec.model.tokenSecretRef.name"
        yield from refused(path, "a secret", token.name, allow.secrets)
    named = uris.inputs_of(job) | uris.starts_of(job) | uris.outputs_of(job)
    for path, uri in named.items():
        if uri.startswith(CLAIM):
            claim = uri.removeprefix(CLAIM).partition("/")[0]
            if volumes.volume_of(claim, profile) is None:
                yield from refused(path, "a claim", claim, allow.claims)
            else:
                yield from refused(path, "a volume", claim, allow.volumes)


def _kept(job: FineTuneJob, profile: Snapshot) -> Iterator[Problem]:
    """Check that the profile's volumes on which the job writes are writable and outlive the pod.

    The root of a volume is refused: the folders of all other jobs on the volume are below it, and
    none of them could start.
    """
    for path, uri in uris.outputs_of(job).items():
        place = volumes.claim_path(uri)
        name = place.claim
        volume = volumes.volume_of(name, profile.spec)
        if volume is None:
            continue
        where = f"{uri} is on volume {name} of profile {profile.name}"
        advice = "name another volume, or a claim"
        if not volumes.is_writable(volume):
            yield Problem(path, f"{where}, which is read-only; {advice}")
        elif volumes.is_lost_with_its_pod(volume):
            text = f"{where}, which is separate for each pod and deleted with it"
            if path == "spec.checkpoint.uri" and job.spec.topology.nodes == 1:
                text += f", so every restart starts over; {advice}"
                yield Problem(path, text, Severity.WARNING)
            else:
                yield Problem(path, f"{text}; {advice}")
        elif not PurePosixPath(place.path).parts:
            text = (
                f"{uri} is the root of volume {name} of profile {profile.name}, which no single "
                f"job may use; name a folder, such as {CLAIM}{name}/{{name}}/{path.split('.')[1]}"
            )
            yield from allow_rules.unless_resumed(job, [Problem(path, text)])


def _nvme(job: FineTuneJob, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    """Check that the optimizer state is on a disk of the pod or of the job.

    It would otherwise replace files on a volume that the profile mounts for other purposes.
    """
    named = job.spec.strategy.nvme_path
    if named is None:
        return
    folders = [volumes.SCRATCH, PurePosixPath(pod_template.MOUNT_ROOT)]
    for uri in uris.outputs_of(job).values():
        claim = volumes.claim_path(uri).claim
        if volumes.volume_of(claim, profile) is None:
            folders.append(volumes.MOUNT_ROOT / claim)
    folders += [
        PurePosixPath(one.mount_path)
        for one in profile.volumes
        if volumes.is_writable(one) and fits(one.name, profile.allow.volumes)
    ]
    path = PurePosixPath(normpath(named))
    if not any(path.is_relative_to(folder) for folder in folders):
        text = (
            f"{named} is not on a disk that the job may write to; use "
            f"{' or '.join(f'{folder}/NAME' for folder in dict.fromkeys(folders))}"
        )
        yield Problem("spec.strategy.nvmePath", text)


def _limits(job: FineTuneJob, profile: Snapshot) -> Iterator[Problem]:
    """Check the queue that the profile requires, the grace period and the sizes of emptyDirs."""
    spec, allow = job.spec, profile.spec.allow
    if allow.require_queue and spec.queue is None:
        text = f"is missing, and profile {profile.name} requires a queue; name a LocalQueue"
        yield Problem("spec.queue", f"{text} of the namespace")
    grace, most = spec.deadlines.termination_grace_seconds, allow.max_termination_grace_seconds
    if most is not None and grace > most:
        text = f"{grace} is more than the {most} that profile {profile.name} allows; use at most"
        yield Problem("spec.deadlines.terminationGraceSeconds", f"{text} {most}")
    yield from pod_template.too_large(spec.pod_template, profile.spec)


def _queue(job: FineTuneJob, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    """Check the priority class; a queue needs no check, because it belongs to the namespace."""
    if job.spec.queue is not None and (name := job.spec.queue.priority_class) is not None:
        path = "spec.queue.priorityClass"
        yield from refused(path, "a priority class", name, profile.allow.priority_classes)


def _nodes(job: FineTuneJob, profile: Snapshot) -> Iterator[Problem]:
    topology, nodes = job.spec.topology, profile.spec.nodes
    wanted, offered = topology.instance_type, nodes.instance_types
    if wanted is not None and offered and wanted not in offered:
        text = f"{wanted} is not offered by profile {profile.name}; use {' or '.join(offered)}"
        yield Problem("spec.topology.instanceType", text)
    if topology.rdma is Rdma.REQUIRED:
        if profile.spec.resources.rdma is None:
            text = (
                f"required is impossible because profile {profile.name} has no InfiniBand; use auto"
            )
            yield Problem("spec.topology.rdma", text)
        elif topology.nodes == 1:
            text = "required has no effect with one node; use auto"
            yield Problem("spec.topology.rdma", text)


def _template(job: FineTuneJob, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    if job.spec.pod_template is not None:
        affinity = scheduling.affinity(job.spec, profile, {})
        yield from pod_template.check(job.spec.pod_template, profile, affinity)
