"""Alerts on jobs: each cause that holds a run back fires exactly one alert.

Slow and stuck ranks are found by the nodes of the job (`finetune_job_suspect`), because PromQL
cannot compare a rank with the median of the others.
"""

from monitoring.limits import CHECKPOINT_INTERVALS, DATA_WAIT, LOST_TIME
from monitoring.rule import JOB, JOB_AT_FIRST, THE_JOB, THE_RANK, Alert, Severity, Worst
from monitoring.windows import Windows, duration

RUNS = 'finetune_job_status_phase{phase="Running"} == 1'


def job_alerts(windows: Windows) -> tuple[Alert, ...]:
    """Return the alerts on jobs and their ranks."""
    return (*_on_ranks(windows), *_on_time(windows), *_on_jobs(windows), *_on_state(windows))


def _silent(windows: Windows) -> str:
    """Return the age of the newest step of jobs in which it exceeds the limit."""
    age = f"time() - max by ({JOB}) (finetune_train_last_step_timestamp_seconds)"
    step = f"max by ({JOB}) (finetune_train_step_duration_ewma_seconds)"
    return f"({age} > clamp_min(10 * {step}, {windows.silence:g}))"


def _counted(events: str) -> str:
    """Return the number of events; rounded, because `increase` extrapolates 3 to 3.1."""
    return f"round(sum by ({JOB}) (increase({events})))"


def _on_ranks(windows: Windows) -> tuple[Alert, ...]:
    return (
        # A rank that waits for rows forever is suspected for its data, and is stuck as well.
        Alert(
            "FineTuneRankStuck",
            'finetune_job_suspect{cause="stuck"} or finetune_job_suspect{cause="data"}'
            f" and on ({JOB}) {_silent(windows)}",
            0,
            Severity.CRITICAL,
            f"{THE_RANK} holds all others up.",
            "It did not come to a collective operation in which the other ranks wait. Its stacks"
            " are in the run directory.",
        ),
        Alert(
            "FineTuneRankSlow",
            'finetune_job_suspect{cause="compute"}',
            windows.shortly,
            Severity.WARNING,
            f"{THE_RANK} computes slower than the others.",
            "For each step it is busy longer than the median of the other ranks, and they wait for"
            " it.",
        ),
    )


def _on_time(windows: Windows) -> tuple[Alert, ...]:
    """Return alerts on shares of wall time, by the rank with the highest share."""
    waits = ("finetunejob_rank:phase:ratio", 'phase="data_wait"')
    saves = ("finetunejob_rank:phase:ratio_long", 'phase="checkpoint_blocking"')
    # Collectives of checkpoints and votes are excluded, because they are rare and differ from step
    # to step.
    moved = 'finetunejob_op:bus_bytes_per_second:max{group=~"dp|shard|replica"}'
    past = duration(windows.past)
    return (
        Alert(
            "FineTuneDataStarved",
            f"max by ({JOB}) ({waits[0]}{{{waits[1]}}}) > {DATA_WAIT:g}",
            windows.long,
            Severity.WARNING,
            f"A rank of {THE_JOB} waits for data.",
            "One waits {{ $value | humanizePercentage }} of its time for the next batch.",
            Worst(waits[0], f"{waits[1]},", "That is"),
        ),
        Alert(
            "FineTuneCheckpointSlow",
            f"max by ({JOB}) ({saves[0]}{{{saves[1]}}}) > 0.1",
            windows.lasting,
            Severity.WARNING,
            f"Checkpoints hold {THE_JOB} up.",
            "A rank waits {{ $value | humanizePercentage }} of its time until checkpoints are"
            " written.",
            Worst(saves[0], f"{saves[1]},", "Longest waits"),
        ),
        Alert(
            "FineTuneNetworkSlow",
            f"{moved} < 0.7 * quantile_over_time(0.9, {moved}[{past}])",
            windows.lasting,
            Severity.WARNING,
            f"The network of {THE_JOB} has become slower.",
            "{{ $labels.op }} in the group {{ $labels.group }} moves {{ $value | humanize }}B/s,"
            " less than 70 % of what it did.",
        ),
    )


def _on_jobs(windows: Windows) -> tuple[Alert, ...]:
    pauses = (
        f'on ({JOB}) finetunejob_rank:phase:ratio{{phase=~"eval|checkpoint_blocking|other"}} > 0.9'
    )
    return (
        # This fires later than the ranks' own verdict, which is more precise, for hangs without a
        # verdict. A rank that was slow before the hang is still suspected for that.
        Alert(
            "FineTuneJobHung",
            f"{_silent(windows)} and on ({JOB}) ({RUNS})"
            f' unless on ({JOB}) finetune_job_suspect{{cause=~"stuck|data"}} unless {pauses}',
            windows.lasting,
            Severity.CRITICAL,
            f"{JOB_AT_FIRST} makes no steps.",
            "The newest step is {{ $value | humanizeDuration }} old. No rank is known to be stuck,"
            " and it is neither an evaluation nor a checkpoint, start or export.",
            Worst("finetune_train_last_seen_age_seconds", "", "Silent for longest is"),
        ),
        Alert(
            "FineTuneJobUnseen",
            f"max by ({JOB}) ({RUNS}) unless on ({JOB}) finetune_train_last_seen_age_seconds",
            windows.long,
            Severity.WARNING,
            f"Nothing is heard of {THE_JOB}.",
            "The operator says that it runs, and no page of its nodes is scraped.",
        ),
        Alert(
            "FineTuneProgressUnknown",
            f'max by ({JOB}) (finetune_job_status_phase{{phase="Unknown"}}) == 1',
            windows.long,
            Severity.WARNING,
            f"The operator cannot read the progress of {THE_JOB}.",
            "All of its pods run, and rank 0 does not respond to the operator. The job may train.",
        ),
        Alert(
            "FineTuneRestartStorm",
            _counted(f"finetune_job_restarts_total[{duration(windows.share)}]") + " > 3",
            0,
            Severity.CRITICAL,
            f"{JOB_AT_FIRST} starts again and again.",
            f"It was started again {{{{ $value | humanize }}}} times in {duration(windows.share)}.",
        ),
    )


def _on_state(windows: Windows) -> tuple[Alert, ...]:
    rate, share = duration(windows.rate), duration(windows.share)
    # The time counts to the newest step, because no checkpoint is due while a job evaluates or
    # exports.
    step = f"max by ({JOB}) (finetune_train_last_step_timestamp_seconds)"
    saved = f"max by ({JOB}) (finetune_train_checkpoint_last_success_timestamp_seconds)"
    interval = f"max by ({JOB}) (finetune_train_checkpoint_interval_seconds)"
    return (
        Alert(
            "FineTuneCheckpointStale",
            f"{step} - {saved} > {CHECKPOINT_INTERVALS} * {interval}",
            windows.lasting,
            Severity.WARNING,
            f"{JOB_AT_FIRST} has no recent checkpoint.",
            "The newest step was made {{ $value | humanizeDuration }} later, more than three times"
            " what was asked for; so much would be lost.",
        ),
        Alert(
            "FineTuneCheckpointFailed",
            _counted(f"finetune_train_checkpoint_failures_total[{share}]") + " > 0",
            0,
            Severity.WARNING,
            f"A checkpoint of {THE_JOB} could not be written.",
            f"In {share} that happened {{{{ $value | humanize }}}} times; training goes on.",
        ),
        Alert(
            "FineTuneNonFinite",
            f"max by ({JOB}, kind) (rate(finetune_train_nonfinite_total[{rate}])) / on ({JOB})"
            f" group_left max by ({JOB}) (rate(finetune_train_steps_total[{rate}]) > 0) > 0.05",
            windows.lasting,
            Severity.WARNING,
            f"The {{{{ $labels.kind }}}} of {THE_JOB} is often not finite.",
            "That is so in {{ $value | humanizePercentage }} of its steps.",
        ),
        Alert(
            "FineTuneTimeLost",
            f"sum by ({JOB}) (clamp_min(delta(finetunejob:wallclock_seconds:max"
            f'{{category=~"recomputed|restarting"}}[{share}]), 0)) / {windows.share:g}'
            f" > {LOST_TIME:g}",
            windows.long,
            Severity.WARNING,
            f"Restarts cost {THE_JOB} much of its time.",
            "{{ $value | humanizePercentage }} of its time went into starting again and into steps"
            " that had been made before.",
        ),
    )
