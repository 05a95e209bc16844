"""The rules as an ARM template for AKS's managed Prometheus, which does not read PrometheusRules.

Limits of Microsoft.AlertsManagement/prometheusRuleGroups: 20 rules per group, at most one
evaluation per minute, times in whole minutes. A text that begins with `[` would be a template
expression.
"""

from monitoring.groups import groups
from monitoring.rule import Alert, Group, Rule, Severity
from monitoring.windows import Windows, iso_duration

MOST_RULES = 20
SHORTEST_INTERVAL = 60
_SEVERITIES = {Severity.CRITICAL: 1, Severity.WARNING: 3}


def template(windows: Windows) -> dict[str, object]:
    """Return the template.

    Raises:
        ValueError: a group or a time does not fit.
    """
    return {
        "$schema": "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#",
        "contentVersion": "1.0.0.0",
        "parameters": {
            "workspaceId": _text("Resource id of the Azure Monitor workspace."),
            "clusterId": _text("Resource id of the AKS cluster."),
            "location": {
                **_text("Region of the workspace."),
                "defaultValue": "[resourceGroup().location]",
            },
            "actionGroupIds": {
                "type": "array",
                "defaultValue": [],
                "metadata": {"description": "Resource ids of the action groups that alerts go to."},
            },
        },
        "variables": {
            "copy": [
                {
                    "name": "actions",
                    "count": "[length(parameters('actionGroupIds'))]",
                    "input": {
                        "actionGroupId": "[parameters('actionGroupIds')[copyIndex('actions')]]"
                    },
                }
            ]
        },
        "resources": [_group(one, windows) for one in groups(windows)],
    }


def _text(description: str) -> dict[str, object]:
    return {"type": "string", "metadata": {"description": description}}


def _group(group: Group, windows: Windows) -> dict[str, object]:
    if len(group.rules) > MOST_RULES:
        raise ValueError(f"{group.name} has {len(group.rules)} rules; Azure takes {MOST_RULES}")
    return {
        "type": "Microsoft.AlertsManagement/prometheusRuleGroups",
        "apiVersion": "2023-03-01",
        "name": group.name,
        "location": "[parameters('location')]",
        "properties": {
            "enabled": True,
            "scopes": ["[parameters('workspaceId')]", "[parameters('clusterId')]"],
            "clusterName": "[last(split(parameters('clusterId'), '/'))]",
            "interval": iso_duration(max(windows.interval, SHORTEST_INTERVAL)),
            "rules": [_rule(one) for one in group.rules],
        },
    }


def _rule(rule: Rule | Alert) -> dict[str, object]:
    if isinstance(rule, Rule):
        return {"record": rule.record, "expression": rule.expr, "enabled": True}
    # The sentence about the worst rank is omitted, because these templates cannot query.
    return {
        "alert": rule.name,
        "expression": rule.expr,
        "for": iso_duration(rule.hold),
        "labels": {"severity": rule.severity.value},
        "annotations": {
            "summary": rule.summary,
            "description": rule.description,
            "runbook_url": rule.runbook_url,
        },
        "severity": _SEVERITIES[rule.severity],
        "enabled": True,
        "actions": "[variables('actions')]",
    }
