"""What the code asks the API server for, read from its calls."""

import ast
from collections.abc import Iterator
from pathlib import Path

import finetune_operator
from finetune_operator.backends.kubernetes import kept
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.submit import CHILD_KINDS
from finetune_operator.kube import resources
from finetune_operator.kube.resources import (
    ACCESS_REVIEWS,
    FINE_TUNE_JOBS,
    PODS,
    SELF_REVIEWS,
    Resource,
)

PACKAGE = Path(finetune_operator.__file__).parent
SOURCES = sorted(
    path
    for folder in ("kernel", "backends/kubernetes")
    for path in (PACKAGE / folder).rglob("*.py")
)
VERBS = {
    "create": "create",
    "delete": "delete",
    "get": "get",
    "list": "list",
    "patch": "patch",
    "replace": "update",
    "watch": "watch",
}
# What calls name by a variable: the kinds it may hold.
VARIABLES = {
    ("backends/kubernetes/submit.py", "resource"): set(CHILD_KINDS.values()),
    ("backends/kubernetes/upkeep.py", "resource"): set(kept.KINDS),
    ("kernel/informer.py", "self.watch.resource"): {
        one.resource for one in KubernetesBackend.watches
    },
    ("kernel/rights.py", "kind"): {ACCESS_REVIEWS},  # reviews of other accounts are the doctor's
}
NOT_CALLED = {(FINE_TUNE_JOBS, "update", "finalizers")}
"""Asked for by an admission plugin when a child is created."""
EVERYBODYS = {(ACCESS_REVIEWS, "create", ""), (SELF_REVIEWS, "create", "")}
"""Given to every account by Kubernetes' own role system:basic-user."""

Right = tuple[Resource, str, str]


def calls_of(path: Path) -> Iterator[Right]:
    """Yield what a file asks a client or kopf for; a kind that cannot be told is a KeyError."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        caller, verb = ast.unparse(node.func.value), node.func.attr
        if (caller, verb) == ("kopf.on", "event"):
            kind = resource_called(ast.unparse(node.args[0]).removesuffix(".group"))
            yield from ((kind, "list", ""), (kind, "watch", ""))
        elif caller.lstrip("_").endswith("client") and verb == "log":
            yield (PODS, "get", "log")
        elif caller.lstrip("_").endswith("client") and verb in VERBS:
            for subresource in subresources_of(node):
                for kind in kinds_of(path, ast.unparse(node.args[0])):
                    yield (kind, VERBS[verb], subresource)


def kinds_of(path: Path, argument: str) -> set[Resource]:
    if argument.isupper():
        return {resource_called(argument)}
    return VARIABLES[(path.relative_to(PACKAGE).as_posix(), argument)]


def resource_called(name: str) -> Resource:
    found = getattr(resources, name)
    assert isinstance(found, Resource)
    return found


def subresources_of(call: ast.Call) -> set[str]:
    for keyword in call.keywords:
        if keyword.arg == "subresource":
            given = ast.walk(keyword.value)
            values = {one.value for one in given if isinstance(one, ast.Constant)}
            return {str(value or "") for value in values}
    return {""}
