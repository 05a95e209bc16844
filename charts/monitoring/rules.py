"""Recording rules about jobs, for expressions that several alerts and panels use.

The part of a name before the first colon is the subject: a job (`finetunejob`), a rank of a job
(`finetunejob_rank`), or a collective operation of a job (`finetunejob_op`).
"""

from monitoring.rule import JOB, RANK, Rule
from monitoring.windows import Windows, duration


def job_rules(windows: Windows) -> tuple[Rule, ...]:
    """Return the rules about jobs, their ranks and their collectives."""
    rate, share = duration(windows.rate), duration(windows.share)
    return (
        # If Prometheus cannot scrape a job's pages, the operator exports its speed.
        Rule(
            "finetunejob:tokens:rate",
            f'sum by ({JOB}) (rate(finetune_train_tokens_total{{kind="nonpad"}}[{rate}]))'
            f" or max by ({JOB}) (finetune_train_tokens_per_second)",
        ),
        # Only ranks with a known peak count, because a share needs a peak.
        Rule(
            "finetunejob:mfu:ratio",
            f"sum by ({JOB}) (rate(finetune_train_model_flops_total[{rate}])"
            f" and on ({JOB}, rank) finetune_train_peak_flops_per_second)"
            f" / sum by ({JOB}) (finetune_train_peak_flops_per_second)",
        ),
        Rule("finetunejob_rank:phase:ratio", _phases(rate)),
        Rule("finetunejob_rank:phase:ratio_long", _phases(share)),
        *_collectives(rate),
        # Gauges that only the leading replica exports; the pod's labels do not belong to them.
        Rule(
            "finetunejob:wallclock_seconds:max",
            f"max by ({JOB}, category) (finetune_job_wallclock_seconds)",
        ),
        Rule(
            "finetunejob:goodput:ratio",
            f'sum by ({JOB}) (finetunejob:wallclock_seconds:max{{category="productive"}})'
            f' / sum by ({JOB}) (finetunejob:wallclock_seconds:max{{category!~"suspended|queued"}}'
            " > 0)",
        ),
    )


def _phases(window: str) -> str:
    """Return the share of a rank's wall time in each phase, while the rank is alive."""
    seconds = f"rate(finetune_train_phase_seconds_total[{window}])"
    whole = f"(sum by ({RANK}) ({seconds}) > 0)"
    return f"sum by ({RANK}, phase) ({seconds}) / on ({RANK}) group_left () {whole}"


def _collectives(window: str) -> tuple[Rule, ...]:
    """Return bus bandwidths, without small messages, whose time is mostly latency."""
    by_rank = f"{RANK}, op, group"
    moved = f'sum by ({by_rank}) (rate(finetune_comm_bus_bytes_total{{size!="small"}}[{window}]))'
    seconds = (
        f'sum by ({by_rank}) (rate(finetune_comm_duration_seconds_total{{size!="small"}}'
        f"[{window}]))"
    )
    return (
        Rule("finetunejob_rank:bus_bytes_per_second:rate", f"{moved} / ({seconds} > 0)"),
        # Each rank measures a collective from its own arrival to the common end. The last rank to
        # arrive does not wait, so its time is that of the network. An average would include the
        # wait for a slow rank.
        Rule(
            "finetunejob_op:bus_bytes_per_second:max",
            f"max by ({JOB}, op, group) (finetunejob_rank:bus_bytes_per_second:rate)",
        ),
    )
