"""What a job's `podTemplate` may add to its pods, and how it is merged below our own fields. Pure.

It is a part of a PodSpec, of which only the fields named here may be set: everything else could
reach what the job's author may not. Who owns a field decides: a name of ours is refused, never
silently kept or replaced.
"""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.lifecycle import PodTemplate
from finetune_operator.api.v1alpha1.profile import Allowances
from finetune_operator.backends.aks.names import CONTAINER, OWNED_PREFIXES

Json = dict[str, Any]

FIELD = "spec.podTemplate"
_SCHEDULING = ("affinity", "nodeSelector", "tolerations")
_POD_FIELDS = ("containers", "imagePullSecrets", *_SCHEDULING, "volumes")
_CONTAINER_FIELDS = ("env", "name", "resources", "volumeMounts")
_VOLUME_SOURCES = ("emptyDir", "persistentVolumeClaim")
# Beside our own names, those by which code gets into the trainer, and so at its identity.
_RESERVED_ENV = (
    "FINETUNE_*",
    "HF_HOME",
    "HF_TOKEN",
    "HOME",
    "JOB_COMPLETION_INDEX",
    "LD_*",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PATH",
    "PYTHON*",
    "RANK",
    "TMPDIR",
    "TORCHELASTIC_*",
    "USER",
    "WORLD_SIZE",
)
_RESERVED_VOLUMES = ("config", "dev-shm", "tmp", "scratch", "claim-*", "profile-*")
_RESERVED_PATHS = ("/dev", "/etc/finetune", "/mnt", "/proc", "/sys", "/tmp", "/scratch")


def check(template: PodTemplate, allow: Allowances) -> Iterator[Problem]:
    """Yield what the template may not say, for a job of a profile that allows `allow`."""
    for kind, named in (
        ("labels", template.metadata.labels),
        ("annotations", template.metadata.annotations),
    ):
        for key in named:
            path = f'{FIELD}.metadata.{kind}["{key}"]'
            if key.startswith(OWNED_PREFIXES):
                yield Problem(path, "is set by the operator; remove it")
            elif not any(fnmatchcase(key, pattern) for pattern in allow.metadata):
                yield Problem(path, "is not allowed by the profile (allow.metadata); remove it")
    spec = template.spec
    yield from _unknown(spec, _POD_FIELDS, f"{FIELD}.spec")
    if not allow.scheduling:
        for name in _SCHEDULING:
            if name in spec:
                text = "is not allowed by the profile (allow.scheduling); remove it"
                yield Problem(f"{FIELD}.spec.{name}", text)
    for index, secret in enumerate(_list(spec, "imagePullSecrets")):
        path = f"{FIELD}.spec.imagePullSecrets[{index}]"
        yield from refused(path, "secret", str(secret.get("name")), allow.secrets)
    yield from _volumes(_list(spec, "volumes"), allow)
    yield from _containers(_list(spec, "containers"), allow)


def merge(template: PodTemplate | None, pod: Json, container: Json) -> None:
    """Add to a rendered pod and its container what a checked template says."""
    if template is None:
        return
    spec = template.spec
    for name in ("imagePullSecrets", "tolerations", "volumes"):
        if _list(spec, name):
            pod[name] = [*pod.get(name, []), *_list(spec, name)]
    if spec.get("nodeSelector"):
        pod["nodeSelector"] = {**spec["nodeSelector"], **pod.get("nodeSelector", {})}
    if spec.get("affinity"):
        pod["affinity"] = {**spec["affinity"], **pod.get("affinity", {})}
    for added in _list(spec, "containers"):
        for name in ("env", "volumeMounts"):
            container[name] = [*container.get(name, []), *_list(added, name)]
        for kind, amounts in (added.get("resources") or {}).items():
            there = container["resources"].get(kind, {})
            container["resources"][kind] = {**amounts, **there}


def refused(path: str, what: str, name: str, allowed: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if no pattern of `allowed` fits `name`."""
    if not any(fnmatchcase(name, pattern) for pattern in allowed):
        listed = f" (allowed: {', '.join(allowed)})" if allowed else ""
        text = f"{name} is a {what} that the profile does not allow{listed}; name another"
        yield Problem(path, text)


def _unknown(value: Mapping[str, Any], known: tuple[str, ...], path: str) -> Iterator[Problem]:
    for name in value:
        if name not in known:
            text = f"cannot be set by a job; remove it, or use one of {', '.join(known)}"
            yield Problem(f"{path}.{name}", text)


def _volumes(volumes: list[Json], allow: Allowances) -> Iterator[Problem]:
    for index, volume in enumerate(volumes):
        path, name = f"{FIELD}.spec.volumes[{index}]", str(volume.get("name"))
        if any(fnmatchcase(name, one) for one in _RESERVED_VOLUMES):
            yield Problem(f"{path}.name", f"{name} is a volume of the operator; use another name")
        yield from _unknown(volume, ("name", *_VOLUME_SOURCES), path)
        if claim := volume.get("persistentVolumeClaim"):
            where = f"{path}.persistentVolumeClaim.claimName"
            yield from refused(where, "claim", str(claim.get("claimName")), allow.claims)


def _containers(containers: list[Json], allow: Allowances) -> Iterator[Problem]:
    for index, container in enumerate(containers):
        path = f"{FIELD}.spec.containers[{index}]"
        if container.get("name") != CONTAINER or index:
            yield Problem(f"{path}.name", f"must be {CONTAINER}, the pods' only container")
        yield from _unknown(container, _CONTAINER_FIELDS, path)
        for at, variable in enumerate(_list(container, "env")):
            yield from _variable(variable, f"{path}.env[{at}]", allow)
        for at, mount in enumerate(_list(container, "volumeMounts")):
            target = str(mount.get("mountPath"))
            if any(target == one or target.startswith(f"{one}/") for one in _RESERVED_PATHS):
                where = f"{path}.volumeMounts[{at}].mountPath"
                yield Problem(where, f"{target} belongs to the operator; use another path")
        for kind in container.get("resources") or {}:
            if kind not in ("requests", "limits"):
                yield Problem(f"{path}.resources.{kind}", "cannot be set by a job; remove it")
            for resource in container["resources"][kind] or {}:
                if resource not in ("cpu", "memory", "ephemeral-storage"):
                    text = "is asked for by the operator; set spec.topology, or the profile"
                    yield Problem(f'{path}.resources.{kind}["{resource}"]', text)


def _variable(variable: Json, path: str, allow: Allowances) -> Iterator[Problem]:
    name = str(variable.get("name"))
    if any(fnmatchcase(name, one) for one in _RESERVED_ENV):
        yield Problem(f"{path}.name", f"{name} is set by the operator; remove it")
    source = variable.get("valueFrom") or {}
    yield from _unknown(source, ("secretKeyRef",), f"{path}.valueFrom")
    if secret := source.get("secretKeyRef"):
        where = f"{path}.valueFrom.secretKeyRef.name"
        yield from refused(where, "secret", str(secret.get("name")), allow.secrets)


def _list(value: Mapping[str, Any], name: str) -> list[Json]:
    """Return a list of objects; the API server refuses what has another form."""
    found = value.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
