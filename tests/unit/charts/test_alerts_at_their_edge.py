"""Alerts where a little more or less decides: which of two or three jobs light one."""

from pathlib import Path

import pytest

from support.charts.played_series import Series, check, needs_promtool, of

pytestmark = needs_promtool


def restarted(job: str, times: int) -> Series:
    """Return a job that was started again so often, once in five minutes."""
    steps = " ".join(f"{n}x4" for n in range(times))
    return {f"finetune_job_restarts_total{of(job, reason='Preempted')}": f"{steps} {times}x90"}


def hung(job: str, cause: str) -> Series:
    """Return a job that makes no step from the fifth minute on, and has a suspect all the time."""
    return {
        f"finetune_job_status_phase{of(job, phase='Running')}": "1x90",
        f"finetune_train_last_step_timestamp_seconds{of(job)}": "0+60x5 300x90",
        f"finetune_train_step_duration_ewma_seconds{of(job)}": "2x90",
        f"finetune_train_last_seen_age_seconds{of(job)}": "1x90",
        f"finetune_job_suspect{of(job, cause=cause)}": "1x90",
    }


def trained(job: str, last_step: str, saved: str) -> Series:
    """Return a job that wants a checkpoint each 10 minutes."""
    return {
        f"finetune_train_last_step_timestamp_seconds{of(job)}": last_step,
        f"finetune_train_checkpoint_last_success_timestamp_seconds{of(job)}": saved,
        f"finetune_train_checkpoint_interval_seconds{of(job)}": "600x90",
    }


def throttled(job: str, **seconds: float) -> Series:
    """Return a job whose GPU has a reduced clock so many seconds of a minute, by reason."""
    info = f"finetune_train_info{of(job, gpu_uuid=f'GPU-{job}')}"
    return {info: "1x90"} | {
        f"finetune_gpu_throttle_seconds_total{of(job, gpu=f'GPU-{job}', reason=one)}": f"0+{n}x90"
        for one, n in seconds.items()
    }


@pytest.mark.parametrize(
    ("alert", "at", "series", "fire"),
    [
        pytest.param(
            "FineTuneRestartStorm",
            "30m30s",
            restarted("three", 3) | restarted("four", 4),
            {"four"},
            id="more than three restarts",
        ),
        pytest.param(
            "FineTuneJobHung",
            "20m",
            hung("was-slow", "compute") | hung("saved-slowly", "checkpoint") | hung("x", "stuck"),
            {"was-slow", "saved-slowly"},
            id="a suspect of before a hang",
        ),
        pytest.param(
            "FineTuneRankStuck",
            "20m",
            hung("was-slow", "compute") | hung("x", "stuck") | hung("without-rows", "data"),
            {"x", "without-rows"},
            id="a suspect that explains a hang",
        ),
        pytest.param(
            "FineTuneCheckpointStale",
            "60m",
            trained("behind", "0+60x90", "0x90")
            | trained("in-time", "0+60x90", "0x29 1800x90")
            | trained("exports", "0+60x10 600x90", "0x10 600x90")
            | trained("lost-its-last", "0+60x40 2400x90", "0x90"),
            {"behind", "lost-its-last"},
            id="training without a checkpoint",
        ),
        pytest.param(
            "FineTuneGpuThrottled",
            "20m",
            throttled("at-once", sw_thermal=2.4, hw_thermal=2.4) | throttled("hot", hw_thermal=3.6),
            {"hot"},
            id="two reasons at the same time",
        ),
    ],
)
def test_an_alert_is_lit_by_these_jobs(
    tmp_path: Path, alert: str, at: str, series: Series, fire: set[str]
) -> None:
    lit = f'count by (finetunejob) (ALERTS{{alertname="{alert}",alertstate="firing"}})'

    check(tmp_path, series, at, lit, {f'{{finetunejob="{job}"}}': 1 for job in fire})
