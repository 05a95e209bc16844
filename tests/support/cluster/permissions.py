"""The rules of the chart's roles, by the operator's own names of kinds."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from finetune_operator.kube import resources
from finetune_operator.kube.resources import Object, Resource

CHART = Path(__file__).parents[3] / "charts/finetune-operator"
_KINDS = {
    (one.group, one.plural): one for one in vars(resources).values() if isinstance(one, Resource)
}


@dataclass(frozen=True)
class Permission:
    """Verbs on one kind, or on a subresource of it."""

    resource: Resource
    verbs: tuple[str, ...]
    subresource: str = ""
    names: tuple[str, ...] = ()

    def to_rule(self) -> Object:
        """Return the rule of a Role or ClusterRole."""
        plural = self.resource.plural
        return {
            "apiGroups": [self.resource.group],
            "resources": [f"{plural}/{self.subresource}" if self.subresource else plural],
            **({"resourceNames": list(self.names)} if self.names else {}),
            "verbs": list(self.verbs),
        }


def _read(rule: Object) -> Permission:
    (group,), (name,) = rule["apiGroups"], rule["resources"]
    plural, _, subresource = name.partition("/")
    names = tuple(rule.get("resourceNames", ()))
    return Permission(_KINDS[group, plural], tuple(rule["verbs"]), subresource, names)


_RULES = yaml.safe_load((CHART / "files/permissions.yaml").read_text(encoding="utf-8"))
WHERE_JOBS_ARE = tuple(_read(one) for one in _RULES["jobs"])
CLUSTER_WIDE = tuple(_read(one) for one in _RULES["profiles"])
FOR_THE_LEASE = tuple(_read(one) for one in _RULES["lease"])
ABOUT_ITSELF = tuple(_read(one) for one in _RULES["own"])
