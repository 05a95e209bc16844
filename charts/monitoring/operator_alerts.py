"""Alerts on the operator itself."""

from monitoring.limits import FAILED_RECONCILES
from monitoring.rule import Alert, Severity
from monitoring.windows import Windows, duration


def operator_alerts(windows: Windows) -> tuple[Alert, ...]:
    """Return the alerts on the operator, which do not concern a single job."""
    rate = duration(windows.rate)
    errors = f"sum by (backend) (rate(finetune_operator_reconcile_errors_total[{rate}]))"
    tries = f"sum by (backend) (rate(finetune_operator_reconcile_duration_seconds_count[{rate}]))"
    return (
        Alert(
            "FineTuneOperatorAbsent",
            "absent(finetune_operator_leader == 1)",
            windows.lasting,
            Severity.CRITICAL,
            "No operator leads: jobs are neither started nor started again.",
            "No replica says that it holds the Lease. Running attempts go on.",
        ),
        Alert(
            "FineTuneOperatorStuck",
            f"finetune_operator_queue_oldest_seconds > {windows.rate:g}",
            windows.shortly,
            Severity.WARNING,
            "The operator does not get on with a job.",
            "One of its queue has not moved for {{ $value | humanizeDuration }}.",
        ),
        Alert(
            "FineTuneOperatorErrors",
            f"{errors} / ({tries} > 0) > {FAILED_RECONCILES:g}",
            windows.long,
            Severity.WARNING,
            "Most of what the operator tries with the backend {{ $labels.backend }} fails.",
            "{{ $value | humanizePercentage }} of the attempts to reconcile a job failed; each is"
            " tried again.",
        ),
        Alert(
            "FineTuneOperatorPageFull",
            "max by (namespace) (finetune_operator_jobs_not_shown) > 0",
            windows.long,
            Severity.WARNING,
            "The operator's page leaves out jobs.",
            "The namespace {{ $labels.namespace }} has so many jobs that {{ $value }} of them have"
            " no metrics.",
        ),
    )
