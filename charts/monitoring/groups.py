"""All groups of rules, in the order of the file."""

from monitoring.alerts import job_alerts
from monitoring.gpus import gpu_alerts, gpu_rules
from monitoring.operator_alerts import operator_alerts
from monitoring.rule import Alert, Group, Rule
from monitoring.rules import job_rules
from monitoring.windows import Windows, duration


def groups(windows: Windows) -> tuple[Group, ...]:
    """Return the groups, whose times are in `windows`."""
    return (
        Group("finetune-jobs.rules", job_rules(windows)),
        Group("finetune-jobs.alerts", job_alerts(windows)),
        Group("finetune-gpus.rules", gpu_rules()),
        Group("finetune-gpus.alerts", gpu_alerts(windows)),
        Group("finetune-operator.alerts", operator_alerts(windows)),
    )


def rules_of(windows: Windows) -> tuple[Rule, ...]:
    """Return the recording rules of all groups."""
    return tuple(one for group in groups(windows) for one in group.rules if isinstance(one, Rule))


def alerts_of(windows: Windows) -> tuple[Alert, ...]:
    """Return the alerts of all groups."""
    return tuple(one for group in groups(windows) for one in group.rules if isinstance(one, Alert))


def rule_file(windows: Windows) -> dict[str, object]:
    """Return a rule file for Prometheus, which is also the spec of a PrometheusRule."""
    return {
        "groups": [
            {
                "name": group.name,
                "interval": duration(windows.interval),
                "rules": [one.to_prometheus() for one in group.rules],
            }
            for group in groups(windows)
        ]
    }
