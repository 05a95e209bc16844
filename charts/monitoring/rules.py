"""Recording rules about jobs: what several alerts and panels ask, worked out once.

A name says what its series are of, before the first colon: a job (`finetunejob`), a rank of one
(`finetunejob_rank`), a collective operation of one (`finetunejob_op`).
"""

from monitoring.rule import JOB, RANK, Rule
from monitoring.windows import Windows, duration


def job_rules(windows: Windows) -> tuple[Rule, ...]:
    """Return the rules about jobs, their ranks and their collectives."""
    rate, share = duration(windows.rate), duration(windows.share)
    return (
        # Where nobody can scrape a job's pages, the operator tells how fast it is.
        Rule(
            "finetunejob:tokens:rate",
            f'sum by ({JOB}) (rate(finetune_train_tokens_total{{kind="nonpad"}}[{rate}]))'
            f" or max by ({JOB}) (finetune_train_tokens_per_second)",
        ),
        # Only of ranks whose peak is known, as the others' would be a share of nothing.
        Rule(
            "finetunejob:mfu:ratio",
            f"sum by ({JOB}) (rate(finetune_train_model_flops_total[{rate}])"
            f" and on ({JOB}, rank) finetune_train_peak_flops_per_second)"
            f" / sum by ({JOB}) (finetune_train_peak_flops_per_second)",
        ),
        Rule("finetunejob_rank:phase:ratio", _phases(rate)),
        Rule("finetunejob_rank:phase:ratio_long", _phases(share)),
        *_collectives(rate),
        # Gauges that only one replica of the operator tells, whose pod is no part of what they say.
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
    """Return the share of its wall time that a rank spends in each phase, while it lives."""
    seconds = f"rate(finetune_train_phase_seconds_total[{window}])"
    whole = f"(sum by ({RANK}) ({seconds}) > 0)"
    return f"sum by ({RANK}, phase) ({seconds}) / on ({RANK}) group_left () {whole}"


def _collectives(window: str) -> tuple[Rule, ...]:
    """Return bus bandwidths; of small messages the time is latency, so they are left out."""
    by_rank = f"{RANK}, op, group"
    moved = f'sum by ({by_rank}) (rate(finetune_comm_bus_bytes_total{{size!="small"}}[{window}]))'
    seconds = (
        f'sum by ({by_rank}) (rate(finetune_comm_duration_seconds_total{{size!="small"}}'
        f"[{window}]))"
    )
    return (
        Rule("finetunejob_rank:bus_bytes_per_second:rate", f"{moved} / ({seconds} > 0)"),
        # A collective takes each rank from its own coming to the common end. The last to come waits
        # for nobody: what it measures is the network. An average would take a slow rank for it.
        Rule(
            "finetunejob_op:bus_bytes_per_second:max",
            f"max by ({JOB}, op, group) (finetunejob_rank:bus_bytes_per_second:rate)",
        ),
    )
