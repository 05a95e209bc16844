"""Fields of a job's `podTemplate` and how they are merged below the operator's own fields. Pure.

Only the fields of a PodSpec that are listed here may be set, because others could grant more
permissions than the job's author has. A name that the operator or the profile uses is refused,
never silently ignored or replaced.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from finetune_operator.api.paths import Finding, show_path
from finetune_operator.api.problems import Problem
from finetune_operator.api.structural import check_structure
from finetune_operator.api.v1alpha1.allowances import Allowances
from finetune_operator.api.v1alpha1.lifecycle import PodTemplate
from finetune_operator.api.v1alpha1.pod_fields import JOB_POD_SPEC, refusals, without_bounds
from finetune_operator.api.v1alpha1.profile import FineTuneProfileSpec
from finetune_operator.backends.allow_rules import fits, refused
from finetune_operator.backends.kubernetes.child_names import CONTAINER, OWNED_PREFIXES
from finetune_operator.backends.kubernetes.quantity import amount
from finetune_operator.backends.kubernetes.scheduling import node_selector

Json = dict[str, Any]

FIELD = "spec.podTemplate"
MOUNT_ROOT = "/extra"
"""A job may mount its volumes only below it: no image has code there that a mount could hide."""

_SCHEDULING = ("affinity", "nodeSelector", "tolerations")
# The operator's own variables, and variables that can load code into the trainer, which could then
# use its identity, send a token elsewhere, or give a container devices that it did not request.
_RESERVED_ENV = (
    "AZURE_*", "CUDA_VISIBLE_DEVICES", "FINETUNE_*", "HF_ENDPOINT", "HF_HOME", "HF_TOKEN", "HOME",
    "JOB_COMPLETION_INDEX", "LD_*", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NVIDIA_*", "OMPI_*", "PATH", "PYTHON*", "RANK", "TMPDIR", "TORCHELASTIC_*", "USER",
    "WORLD_SIZE",
)  # fmt: skip
_RESERVED_VOLUMES = ("config", "dev-shm", "tmp", "scratch", "claim-*", "profile-*")
# Without bounds, because the next attempt of a job that was stored before them may start.
_SPEC = without_bounds(JOB_POD_SPEC)


def check(template: PodTemplate, profile: FineTuneProfileSpec, affinity: Json) -> Iterator[Problem]:
    """Yield the fields that the template may not set; the rendered `affinity` is fixed."""
    yield from _metadata(template, profile.allow)
    spec = template.spec
    path = ("spec", "podTemplate", "spec")
    if wrong := [*check_structure(spec, _SPEC, path), *refusals(spec, _SPEC, path)]:
        yield from map(_problem, wrong)
        return
    yield from _scheduling(spec, profile, affinity)
    for index, secret in enumerate(spec.get("imagePullSecrets", ())):
        where = f"{FIELD}.spec.imagePullSecrets[{index}].name"
        yield from refused(where, "a secret", secret["name"], profile.allow.secrets)
    yield from _volumes(spec, profile.allow)
    for index, container in enumerate(spec.get("containers", ())):
        yield from _container(container, index, spec, profile)


def merge(template: PodTemplate | None, pod: Json, container: Json) -> None:
    """Merge a checked template into a rendered pod and its container."""
    if template is None:
        return
    spec = template.spec
    for name in ("imagePullSecrets", "tolerations", "volumes"):
        if spec.get(name):
            pod[name] = [*pod.get(name, []), *spec[name]]
    for name in ("nodeSelector", "affinity"):
        if spec.get(name):
            pod[name] = {**spec[name], **pod.get(name, {})}
    for added in spec.get("containers", ()):
        given = {one["name"] for one in added.get("env", ())}
        defaults = [one for one in container["env"] if one["name"] not in given]
        container["env"] = [*defaults, *added.get("env", ())]
        container["volumeMounts"] = [*container["volumeMounts"], *added.get("volumeMounts", ())]
        for kind, amounts in added.get("resources", {}).items():
            there = container["resources"].get(kind, {})
            container["resources"][kind] = {**amounts, **there}


def requested_cpu(template: PodTemplate | None) -> str | int | None:
    """Return the cores that a checked template requests."""
    for container in template.spec.get("containers", ()) if template else ():
        resources = container.get("resources", {})
        for kind in ("requests", "limits"):
            if (cpu := resources.get(kind, {}).get("cpu")) is not None:
                return str(cpu)
    return None


def _problem(finding: Finding) -> Problem:
    text = finding.message
    if finding.is_unknown:  # unknown to this schema, but perhaps known to Kubernetes
        text = f"cannot be set by a job; {text.partition('; ')[2]}"
    return Problem(show_path(finding.path), text)


def _metadata(template: PodTemplate, allow: Allowances) -> Iterator[Problem]:
    for kind, named in (
        ("labels", template.metadata.labels),
        ("annotations", template.metadata.annotations),
    ):
        for key in named:
            path = f'{FIELD}.metadata.{kind}["{key}"]'
            if key.startswith(OWNED_PREFIXES):
                yield Problem(path, "is set by the operator; remove it")
            elif not fits(key, allow.metadata):
                yield Problem(path, "is not allowed by the profile (allow.metadata); remove it")


def _scheduling(
    spec: Mapping[str, Any], profile: FineTuneProfileSpec, affinity: Json
) -> Iterator[Problem]:
    if not profile.allow.scheduling:
        for name in _SCHEDULING:
            if name in spec:
                text = "is not allowed by the profile (allow.scheduling); remove it"
                yield Problem(f"{FIELD}.spec.{name}", text)
        return
    for key in spec.get("nodeSelector", {}):
        if key in node_selector(profile):
            path = show_path(("spec", "podTemplate", "spec", "nodeSelector", key))
            yield Problem(path, "is set by the profile or the operator; remove it")
    for kind in spec.get("affinity", {}):
        if kind in affinity:
            text = "is set by the operator, from spec.topology and the profile; remove it"
            yield Problem(f"{FIELD}.spec.affinity.{kind}", text)


def _volumes(spec: Mapping[str, Any], allow: Allowances) -> Iterator[Problem]:
    for index, volume in enumerate(spec.get("volumes", ())):
        path, name = f"{FIELD}.spec.volumes[{index}]", volume["name"]
        if fits(name, _RESERVED_VOLUMES):
            yield Problem(f"{path}.name", f"{name} is a volume of the operator; use another name")
        if ("emptyDir" in volume) == ("persistentVolumeClaim" in volume):
            yield Problem(path, "must be either emptyDir or persistentVolumeClaim")
        elif claim := volume.get("persistentVolumeClaim"):
            where = f"{path}.persistentVolumeClaim.claimName"
            yield from refused(where, "a claim", claim["claimName"], allow.claims)


def too_large(template: PodTemplate | None, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    """Check the sizes of emptyDirs, which use the disk or the memory of a node."""
    most = profile.allow.max_empty_dir
    if template is None or most is None:
        return
    for index, volume in enumerate(template.spec.get("volumes", ())):
        if "emptyDir" not in volume:
            continue
        path = f"{FIELD}.spec.volumes[{index}].emptyDir.sizeLimit"
        limit = (volume["emptyDir"] or {}).get("sizeLimit")
        try:
            if limit is None:
                yield Problem(path, f"is missing; set at most {most} (allow.maxEmptyDir)")
            elif amount(limit) > amount(most):
                text = f"{limit} is more than the {most} that the profile allows; use less"
                yield Problem(path, text)
        except ValueError as error:
            yield Problem(path, str(error))


def _container(
    container: Json, index: int, spec: Mapping[str, Any], profile: FineTuneProfileSpec
) -> Iterator[Problem]:
    path = f"{FIELD}.spec.containers[{index}]"
    if container["name"] != CONTAINER or index:
        yield Problem(f"{path}.name", f"must be {CONTAINER}, the pods' only container")
    for at, variable in enumerate(container.get("env", ())):
        yield from _variable(variable, f"{path}.env[{at}]", profile)
    own = [volume["name"] for volume in spec.get("volumes", ())]
    for at, mount in enumerate(container.get("volumeMounts", ())):
        yield from _mount(mount, f"{path}.volumeMounts[{at}]", own)
    for kind, asked in container.get("resources", {}).items():
        for resource, value in asked.items():
            where = show_path(
                ("spec", "podTemplate", "spec", "containers", index, "resources", kind, resource)
            )
            yield from _resource(where, resource, value, profile)


def _mount(mount: Json, path: str, own: Collection[str]) -> Iterator[Problem]:
    """Check a mount, which could make a volume writable or hide code."""
    name, target = mount["name"], mount["mountPath"]
    if name not in own:
        text = f"{name} is not a volume of podTemplate.spec.volumes; mount a listed volume"
        yield Problem(f"{path}.name", text)
    parts = target.removeprefix(MOUNT_ROOT).split("/")
    if not target.startswith(f"{MOUNT_ROOT}/") or {"", ".", ".."} & set(parts[1:]):
        text = f"{target} is not below {MOUNT_ROOT}; write {MOUNT_ROOT}/NAME"
        yield Problem(f"{path}.mountPath", text)


def _resource(
    path: str, resource: str, value: str | int, profile: FineTuneProfileSpec
) -> Iterator[Problem]:
    if resource not in ("cpu", "memory", "ephemeral-storage"):
        yield Problem(path, "is requested by the operator; set spec.topology, or the profile")
        return
    set_by_profile = {
        **profile.resources.other,
        "cpu": profile.resources.cpu,
        "memory": profile.resources.memory,
    }
    if set_by_profile.get(resource) is not None:
        yield Problem(path, "is set by the profile; remove it")
        return
    most = profile.allow.max_resources.get(resource)
    if most is None:
        yield Problem(path, "is not allowed by the profile (allow.maxResources); remove it")
        return
    try:
        is_too_much = amount(value) > amount(most)
    except ValueError as error:
        yield Problem(path, str(error))
        return
    if is_too_much:
        yield Problem(path, f"{value} is more than the {most} that the profile allows; use less")


def _variable(variable: Json, path: str, profile: FineTuneProfileSpec) -> Iterator[Problem]:
    name = variable["name"]
    if fits(name, _RESERVED_ENV):
        yield Problem(f"{path}.name", f"{name} is set by the operator; remove it")
    elif name in profile.env:
        yield Problem(f"{path}.name", f"{name} is set by the profile; remove it")
    else:
        yield from refused(f"{path}.name", "a variable", name, profile.allow.env)
    if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
        where = f"{path}.valueFrom.secretKeyRef.name"
        yield from refused(where, "a secret", secret["name"], profile.allow.secrets)
