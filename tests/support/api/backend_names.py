"""Blocks `spec.backend` that mean the same under the two names of the kubernetes backend."""

from typing import Any

SAME: dict[str, list[dict[str, Any] | None]] = {
    "defaults": [
        None,
        {},
        {"type": "kubernetes"},
        {"type": "aks"},
        {"aks": {}},
        {"type": "aks", "aks": {"profile": "default"}},
        {"type": "kubernetes", "kubernetes": {"profile": "default"}},
        {"type": "kubernetes", "aks": {}},
    ],
    "settings": [
        {"type": "aks", "aks": {"profile": "a", "image": "b:1", "serviceAccountName": "c"}},
        {"kubernetes": {"profile": "a", "image": "b:1", "serviceAccountName": "c"}},
    ],
}
OTHER: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
    (None, {"type": "azureml"}),
    ({"type": "local"}, None),
    ({"type": "aks"}, {"type": "local"}),
]
"""Pairs of different backends."""
CHANGED: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = [
    (None, {"kubernetes": {"profile": "a"}}),
    ({"type": "aks", "aks": {"profile": "a"}}, {"type": "kubernetes"}),
    ({"aks": {"image": "a:1"}}, {"kubernetes": {"image": "a:2"}}),
    ({"kubernetes": {"serviceAccountName": "a"}}, {"kubernetes": {}}),
]
"""Pairs with different settings of the kubernetes backend."""
CHANGES = [
    *((old, new, "") for alike in SAME.values() for old in alike for new in alike),
    *((*pair, "spec.backend.type") for pair in OTHER),
    *((*pair, "spec.backend;") for pair in CHANGED),
]
"""Old block, new block, and the field that an update of a running job is refused for."""
