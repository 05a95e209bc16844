"""The dashboard of all jobs and of the operator."""

from finetune_trainer.config.metrics import Needs
from monitoring.board import Board, Kind, Panel, Query, Row, Variable
from monitoring.rule import JOB
from monitoring.windows import Windows, duration

_OF = 'namespace=~"$namespace"'
_RATE = "$__rate_interval"
_JOB = "{{namespace}}/{{finetunejob}}"


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
        (_jobs(), _use(windows), _waits(windows), _operator()),
    )


def _jobs() -> Row:
    return Row(
        "Jobs",
        (
            Panel(
                "Jobs by phase",
                "As their status says.",
                "none",
                (
                    Query(
                        f"sum by (phase) (max by ({JOB}, phase)"
                        f" (finetune_job_status_phase{{{_OF}}})) > 0",
                        "{{phase}}",
                    ),
                ),
                Kind.STACK,
                width=12,
            ),
            Panel(
                "Jobs",
                "Step, tokens a second, share of the time with new steps, and of the GPUs' peak.",
                "none",
                (
                    Query(f"max by ({JOB}, phase) (finetune_job_status_phase{{{_OF}}} == 1)"),
                    Query(f"max by ({JOB}) (finetune_train_global_step{{{_OF}}})"),
                    Query(f"finetunejob:tokens:rate{{{_OF}}}"),
                    Query(f"finetunejob:goodput:ratio{{{_OF}}}"),
                    Query(f"finetunejob:mfu:ratio{{{_OF}}}"),
                ),
                Kind.TABLE,
                width=12,
                columns=("in phase", "step", "tokens/s", "goodput", "MFU"),
            ),
            Panel(
                "Suspects",
                "Ranks that hold their job back, and why.",
                "none",
                (Query(f"max by ({JOB}, node, rank, cause) (finetune_job_suspect{{{_OF}}})"),),
                Kind.TABLE,
                width=12,
                columns=("suspects",),
                is_empty_when_well=True,
            ),
            Panel(
                "Restarts",
                "Since the job was created, by reason.",
                "none",
                (
                    Query(
                        "max by (namespace, finetunejob, reason)"
                        f" (finetune_job_restarts_total{{{_OF}}}) > 0",
                        f"{_JOB}: {{{{reason}}}}",
                    ),
                ),
                width=12,
                is_empty_when_well=True,
            ),
        ),
    )


def _use(windows: Windows) -> Row:
    share = duration(windows.share)
    return Row(
        "What the time goes into",
        (
            Panel(
                "Time of all jobs",
                "Seconds a second, by what they go into: as many jobs do that now.",
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
            ),
            Panel(
                "Tokens",
                "A second, without padding.",
                "none",
                (Query(f"finetunejob:tokens:rate{{{_OF}}}", _JOB),),
            ),
            Panel(
                "Model FLOPs utilisation",
                "Of the dense peak of the GPUs.",
                "percentunit",
                (Query(f"finetunejob:mfu:ratio{{{_OF}}}", _JOB),),
                needs=Needs.GPU,
            ),
            Panel(
                "GPUs with a rank",
                "By job.",
                "none",
                (Query(f"count by ({JOB}) (finetune_gpu:rank:info{{{_OF}}})", _JOB),),
                Kind.STACK,
                needs=Needs.GPU,
            ),
            Panel(
                "Power",
                "Of the GPUs of each job.",
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
            ),
        ),
    )


def _waits(windows: Windows) -> Row:
    """Return panels about events that happen once per job or attempt, over a long range."""
    past = duration(windows.past)

    def median(title: str, description: str, name: str) -> Panel:
        buckets = f"sum by (backend, le) (increase(finetune_job_{name}_seconds_bucket[{past}]))"
        query = Query(f"histogram_quantile(0.5, {buckets})", "{{backend}}")
        return Panel(title, f"{description} Median of {past}.", "s", (query,))

    return Row(
        "How long users wait",
        (
            median("To the first step", "From the creation of a job.", "time_to_first_step"),
            median("In a queue", "Before the first step.", "queue_wait"),
            median("To recover", "From a loss of ranks until they train again.", "recovery"),
            Panel(
                "Jobs ended",
                f"In {past}.",
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
                "Time of ended jobs",
                f"Where it went, of those that ended in {past}, also between two scrapes.",
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


def _operator() -> Row:
    took = f"rate(finetune_operator_reconcile_duration_seconds_bucket[{_RATE}])"
    return Row(
        "The operator",
        (
            Panel(
                "Time to reconcile a job",
                "99 % are faster, by backend.",
                "s",
                (Query(f"histogram_quantile(0.99, sum by (backend, le) ({took}))", "{{backend}}"),),
            ),
            Panel(
                "Failures",
                "A second; each is tried again.",
                "none",
                (
                    Query(
                        "sum by (backend)"
                        f" (rate(finetune_operator_reconcile_errors_total[{_RATE}]))",
                        "{{backend}}",
                    ),
                ),
            ),
            Panel(
                "Queue",
                "Jobs that wait to be reconciled, or are being.",
                "none",
                (Query("max(finetune_operator_queue_depth)", "jobs"),),
            ),
            Panel(
                "Oldest of the queue",
                "How long it has not moved.",
                "s",
                (Query("max(finetune_operator_queue_oldest_seconds)", "age"),),
            ),
            Panel(
                "Requests to the API server",
                "A second, by what it answered; 0 is no answer.",
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
                "Leaders",
                "One, or for a moment none.",
                "none",
                (Query("sum(finetune_operator_leader)", "leaders"),),
            ),
        ),
    )
