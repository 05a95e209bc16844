"""`ftctl doctor --cluster`: find why replicas of the operator are not Ready, and how to fix it.

Pure functions. A Deployment reports why its pods are refused, and a pod reports why its container
does not run. For a known fault of image, quota or node the finding has one sentence and one
command.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from finetune_operator.cli.top_rows import get_in
from finetune_operator.kube.resources import Object

CHART = "charts/finetune-operator"

_NO_PROGRAM = re.compile(r'exec: "([^"]+)": .*(?:not found|no such file)')
_BUILD = "  # built by: REGISTRY=REGISTRY docker buildx bake operator --push"
_OTHER_PROCESSOR = re.compile(r"exec format error|no match for platform")
_QUOTA = re.compile(r"exceeded quota: ([^,\s]+)")
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True)
class Owner:
    """The Deployment of the operator, with the names that commands need.

    Attributes:
        release: Name of the helm release; empty if the operator was installed without helm.
        selector: Labels of the pods.
    """

    namespace: str
    name: str
    release: str
    selector: str

    def another_user(self) -> str:
        """Return the command that runs the pods as the user of the image."""
        if self.release:
            return self._upgrade("--set podSecurityContext.runAsUser=65532")
        patch = '{"spec":{"template":{"spec":{"securityContext":{"runAsUser":65532}}}}}'
        return f"kubectl -n {self.namespace} patch deployment {self.name} -p '{patch}'"

    def another_image(self, image: str) -> str:
        """Return the command that sets another image."""
        if self.release:
            return self._upgrade(f"--set image.repository={image}")
        return f"kubectl -n {self.namespace} set image deployment/{self.name} operator={image}"

    def description(self) -> str:
        """Return the command that shows the pods with their Events."""
        return f"kubectl -n {self.namespace} describe pods -l {self.selector}"

    def _upgrade(self, options: str) -> str:
        given = f"-n {self.namespace} --reset-then-reuse-values"
        return f"helm upgrade {self.release} {CHART} {given} {options}"


@dataclass(frozen=True)
class Trouble:
    """A reason, empty if unknown, and the command that fixes it or shows more."""

    why: str
    remedy: str


def trouble_of(owner: Owner, deployment: Object, pods: Iterable[Object]) -> Trouble:
    """Return why fewer replicas are Ready than wanted, by the first fault found."""
    for condition in get_in(deployment, "status", "conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return _not_created(owner, str(condition.get("message", "")))
    for pod in pods:
        conditions = get_in(pod, "status", "conditions") or ()
        if any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
            continue
        if found := _of_pod(owner, pod):
            return found
    return Trouble("", owner.description())


def _not_created(owner: Owner, text: str) -> Trouble:
    """Return why pods are not created."""
    if quota := _QUOTA.search(text):
        remedy = f"kubectl -n {owner.namespace} edit resourcequota {quota[1]}  # raise the limit"
    elif "violates PodSecurity" in text:
        release = f"{owner.release or owner.name} -n {owner.namespace}"
        remedy = f"helm get values {release}  # which of them set these fields"
    else:
        remedy = f"kubectl -n {owner.namespace} describe replicasets -l {owner.selector}"
    return Trouble(f"no pod can be created: {text}", remedy)


def _of_pod(owner: Owner, pod: Object) -> Trouble | None:
    for state in get_in(pod, "status", "initContainerStatuses") or ():
        if found := _of_init_container(owner, state):
            return found
    for state in get_in(pod, "status", "containerStatuses") or ():
        waiting = get_in(state, "state", "waiting") or {}
        ended = get_in(state, "state", "terminated") or get_in(state, "lastState", "terminated")
        parts = [waiting.get("reason"), waiting.get("message"), (ended or {}).get("message")]
        if words := ": ".join(str(part).strip() for part in parts if part):
            return _of_container(owner, str(state.get("image", "")), words)
    for condition in get_in(pod, "status", "conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Trouble(
                str(condition.get("message", "it has no node")), "kubectl describe nodes"
            )
    return None


def _of_init_container(owner: Owner, state: Object) -> Trouble | None:
    """Return why an init container keeps the operator's container from starting."""
    waiting = get_in(state, "state", "waiting") or {}
    ended = get_in(state, "state", "terminated") or {}
    reason = str(waiting.get("reason") or ended.get("reason") or "")
    if reason in ("", "PodInitializing", "Completed"):
        return None
    name = state.get("name")
    detail = ": ".join(filter(None, (reason, waiting.get("message") or ended.get("message"))))
    remedy = f"kubectl -n {owner.namespace} logs -l {owner.selector} -c {name} --tail=20"
    if reason in _NO_IMAGE:
        remedy = owner.description()
    return Trouble(f"its init container {name} fails ({detail})", remedy)


def _of_container(owner: Owner, image: str, words: str) -> Trouble:
    """Return why a container does not run, by the message of the kubelet."""
    own = "REGISTRY/finetune-operator"
    if _OTHER_PROCESSOR.search(words):
        why = f"the image {image} is built for another processor than its node has ({words})"
        platforms = "--set '*.platform=linux/amd64,linux/arm64'"
        return Trouble(why, f"REGISTRY=REGISTRY docker buildx bake operator --push {platforms}")
    if lacks := _NO_PROGRAM.search(words):
        why = f"the image {image} has no program {lacks[1]}, so it is not the operator's ({words})"
        return Trouble(why, f"{owner.another_image(own)}{_BUILD}")
    if "will run as root" in words or "non-numeric user" in words:
        why = f"the image {image} would run as root, or as an unknown user ({words})"
        return Trouble(why, owner.another_user())
    if words.startswith(_NO_IMAGE):
        why = f"the image {image} cannot be pulled ({words})"
        return Trouble(why, f"{owner.another_image(own)}{_BUILD}")
    if words in ("ContainerCreating", "PodInitializing"):  # its Events give the reason for a delay
        return Trouble(words, owner.description())
    return Trouble(words, f"kubectl -n {owner.namespace} logs -l {owner.selector} --tail=20")
