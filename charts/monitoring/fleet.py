"""The dashboard of all jobs and of the operator."""

from finetune_trainer.config.metrics import Needs
from monitoring.board import (
    TO_JOB,
    TO_NODE,
    Board,
    Column,
    Kind,
    Limit,
    Panel,
    Query,
    Row,
    Variable,
)
from monitoring.limits import FAILED_RECONCILES, LOST_TIME
from monitoring.rule import JOB
from monitoring.windows import Windows, duration

_OF = 'namespace=~"$namespace"'
_RATE = "$__rate_interval"
_JOB = "{{namespace}}/{{finetunejob}}"
GOODPUT = Limit(1 - LOST_TIME, "FineTuneTimeLost", is_minimum=True)
"""Goodput of a job that loses as much time as the alert allows, and nothing else."""


def fleet_board(windows: Windows) -> Board:
    """Return the dashboard."""
    return Board(
        "fleet",
        "Fine-tuning: all jobs",
        "Which jobs run, how well, and how the operator is.",
        (
            Variable(
                "namespace", "label_values(finetune_job_status_phase, namespace)", is_many=True
            ),
        ),
        (_jobs(), _use(windows), _gpus(), _waits(windows), _operator(windows)),
    )


def _jobs() -> Row:
    return Row(
        "Jobs",
        (
            _table_of_jobs(),
            Panel(
                "Jobs by phase",
                "Phases as in the status of the jobs.",
                "none",
                (
                    Query(
                        f"sum by (phase) (max by ({JOB}, phase)"
                        f" (finetune_job_status_phase{{{_OF}}})) > 0",
                        "{{phase}}",
                    ),
                ),
                Kind.STACK,
            ),
            Panel(
                "Suspected ranks",
                "Ranks that hold their job back, and the cause.",
                "none",
                (Query(f"max by ({JOB}, node, rank, cause) (finetune_job_suspect{{{_OF}}})"),),
                Kind.TABLE,
                columns=(Column(""),),
                links=(TO_JOB, TO_NODE),
                is_empty_when_well=True,
            ),
            Panel(
                "Restarts since creation, by reason",
                "Attempts that another attempt followed.",
                "none",
                (
                    Query(
                        "max by (namespace, finetunejob, reason)"
                        f" (finetune_job_restarts_total{{{_OF}}}) > 0",
                        f"{_JOB}: {{{{reason}}}}",
                    ),
                ),
                links=(TO_JOB,),
                is_empty_when_well=True,
            ),
        ),
    )


def _table_of_jobs() -> Panel:
    restarts = f"max by ({JOB}, reason) (finetune_job_restarts_total{{{_OF}}})"
    columns = (
        ("", "none", f"max by ({JOB}, phase) (finetune_job_status_phase{{{_OF}}} == 1)"),
        ("step", "none", f"max by ({JOB}) (finetune_train_global_step{{{_OF}}})"),
        ("progress", "percentunit", f"max by ({JOB}) (finetune_job_progress_ratio{{{_OF}}})"),
        ("time left", "s", f"max by ({JOB}) (finetune_job_eta_seconds{{{_OF}}})"),
        ("loss", "none", f"max by ({JOB}) (finetune_train_loss{{{_OF}}})"),
        ("tokens/s", "short", f"finetunejob:tokens:rate{{{_OF}}}"),
        ("restarts", "none", f"sum by ({JOB}) ({restarts})"),
        ("goodput", "percentunit", f"finetunejob:goodput:ratio{{{_OF}}}"),
        ("MFU", "percentunit", f"finetunejob:mfu:ratio{{{_OF}}}"),
    )
    return Panel(
        "Jobs",
        "The time left is a forecast of the operator; goodput is the share of the time with"
        " resources in which new steps were made, and MFU the share of the GPUs' peak.",
        "none",
        tuple(Query(expr) for _, _, expr in columns),
        Kind.TABLE,
        width=24,
        columns=tuple(
            Column(name, unit, GOODPUT if name == "goodput" else None) for name, unit, _ in columns
        ),
        links=(TO_JOB,),
    )


def _use(windows: Windows) -> Row:
    share = duration(windows.share)
    return Row(
        "What the time goes into",
        (
            Panel(
                "Jobs by time category",
                "Average number of jobs whose time went into a category, as in their ledgers.",
                "none",
                (
                    Query(
                        # It starts again for a job that was created again.
                        "sum by (category) (clamp_min(delta(finetunejob:wallclock_seconds:max"
                        f"{{{_OF}}}[{share}]), 0)) / {windows.share:g}",
                        "{{category}}",
                    ),
                ),
                Kind.STACK,
            ),
            Panel(
                "Goodput",
                "Share of the time with resources in which new steps were made.",
                "percentunit",
                (Query(f"finetunejob:goodput:ratio{{{_OF}}}", _JOB),),
                limit=GOODPUT,
                links=(TO_JOB,),
            ),
            Panel(
                "Tokens per second",
                "Without padding.",
                "short",
                (Query(f"finetunejob:tokens:rate{{{_OF}}}", _JOB),),
                links=(TO_JOB,),
            ),
        ),
    )


def _gpus() -> Row:
    return Row(
        "GPUs",
        (
            Panel(
                "Model FLOPs utilisation (MFU)",
                "Share of the dense peak of the GPUs.",
                "percentunit",
                (Query(f"finetunejob:mfu:ratio{{{_OF}}}", _JOB),),
                needs=Needs.GPU,
                links=(TO_JOB,),
            ),
            Panel(
                "GPUs per job",
                "GPUs that have a rank.",
                "none",
                (Query(f"count by ({JOB}) (finetune_gpu:rank:info{{{_OF}}})", _JOB),),
                Kind.STACK,
                needs=Needs.GPU,
                links=(TO_JOB,),
            ),
            Panel(
                "GPU power per job",
                "Sum over the GPUs of a job.",
                "watt",
                (
                    Query(
                        f"sum by ({JOB}) (finetune_gpu:power:watts * on (gpu) group_left ({JOB})"
                        f" finetune_gpu:rank:info{{{_OF}}})",
                        _JOB,
                    ),
                ),
                Kind.STACK,
                needs=Needs.GPU,
                links=(TO_JOB,),
            ),
        ),
        is_collapsed=True,
    )


def _waits(windows: Windows) -> Row:
    """Return panels about events that happen once per job or attempt, over a long range."""
    past = duration(windows.past)

    def median(title: str, description: str, name: str) -> Panel:
        buckets = f"sum by (backend, le) (increase(finetune_job_{name}_seconds_bucket[{past}]))"
        query = Query(f"histogram_quantile(0.5, {buckets})", "{{backend}}")
        return Panel(f"{title}, median", f"{description} Over {past}.", "s", (query,))

    return Row(
        "How long users wait",
        (
            median("Time to the first step", "From the creation of a job.", "time_to_first_step"),
            median("Time in a queue", "Before the first step.", "queue_wait"),
            median("Recovery time", "From a loss of ranks until they train again.", "recovery"),
            Panel(
                "Finished jobs by phase",
                f"Jobs that ended in {past}.",
                "none",
                (
                    Query(
                        f"sum by (phase) (increase(finetune_job_ends_total[{past}]))", "{{phase}}"
                    ),
                ),
                Kind.STACK,
                width=12,
            ),
            Panel(
                "Time of finished jobs by category",
                f"Jobs that ended in {past}, including jobs between two scrapes.",
                "s",
                (
                    Query(
                        "sum by (category) (increase(finetune_job_ended_wallclock_seconds_total"
                        f"[{past}]))",
                        "{{category}}",
                    ),
                ),
                Kind.STACK,
                width=12,
            ),
        ),
    )


def _operator(windows: Windows) -> Row:
    took = f"rate(finetune_operator_reconcile_duration_seconds_bucket[{_RATE}])"
    errors = f"sum by (backend) (rate(finetune_operator_reconcile_errors_total[{_RATE}]))"
    tries = (
        f"sum by (backend) (rate(finetune_operator_reconcile_duration_seconds_count[{_RATE}]) > 0)"
    )
    return Row(
        "The operator",
        (
            Panel(
                "Reconcile duration, 99th percentile",
                "Time to reconcile one job once, by backend.",
                "s",
                (Query(f"histogram_quantile(0.99, sum by (backend, le) ({took}))", "{{backend}}"),),
            ),
            Panel(
                "Share of failed reconciles",
                "Each is retried.",
                "percentunit",
                (Query(f"{errors} / {tries}", "{{backend}}"),),
                limit=Limit(FAILED_RECONCILES, "FineTuneOperatorErrors"),
            ),
            Panel(
                "Jobs in the reconcile queue",
                "Jobs that wait to be reconciled, or are being reconciled.",
                "none",
                (Query("max(finetune_operator_queue_depth)", "jobs"),),
            ),
            Panel(
                "Age of the oldest queued job",
                "Time for which it has not progressed.",
                "s",
                (Query("max(finetune_operator_queue_oldest_seconds)", "age"),),
                limit=Limit(windows.rate, "FineTuneOperatorStuck"),
            ),
            Panel(
                "API server requests by status code",
                "Requests per second; code 0 means no response.",
                "reqps",
                (
                    Query(
                        f"sum by (code) (rate(finetune_operator_api_requests_total[{_RATE}]))",
                        "{{code}}",
                    ),
                ),
                Kind.STACK,
            ),
            Panel(
                "Leading replicas",
                "One, or none for a moment.",
                "none",
                (Query("sum(finetune_operator_leader)", "leaders"),),
                limit=Limit(1, "FineTuneOperatorAbsent", is_minimum=True),
            ),
        ),
    )
