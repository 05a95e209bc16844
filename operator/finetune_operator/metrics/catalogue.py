"""Every metric of the operator, declared once with the trainer's `Metric`.

The metrics page and `docs/reference/metrics.md` are generated from it. The operator exports series
of all jobs, each with the labels of its job, which the scrape configuration must not overwrite
(`honorLabels`).
"""

from dataclasses import replace

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.reconcile.categories import Category
from finetune_trainer.config import FailureClass, SuspectCause
from finetune_trainer.config import metrics as trainer
from finetune_trainer.config.metrics import Label, Metric, MetricType

BACKEND = Label("backend")
OF_JOB = (Label("namespace"), Label("finetunejob"))

CATEGORY = Label("category", tuple(Category))
RESTARTED = tuple(
    failure.value for failure in FailureClass if failure is not FailureClass.COMPLETED
)
"""Classes after which an attempt may follow."""

_WAIT_BUCKETS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
_RECONCILE_BUCKETS = tuple(round(0.001 * 2**k, 3) for k in range(15))

LEADER = Metric(
    "finetune_operator_leader",
    MetricType.GAUGE,
    "replicas",
    "1 while this replica holds the Lease, else 0; only the leader exports jobs and queue.",
    (),
)
BUILD_INFO = Metric(
    "finetune_operator_build_info",
    MetricType.GAUGE,
    "replicas",
    "Version of the operator; always 1.",
    (Label("version"),),
)
API_REQUESTS = Metric(
    "finetune_operator_api_requests_total",
    MetricType.COUNTER,
    "requests",
    "Requests to the API server; code is the HTTP status, 0 if there was no response.",
    (Label("verb"), Label("resource"), Label("code")),
)
RECONCILE_DURATION = Metric(
    "finetune_operator_reconcile_duration_seconds",
    MetricType.HISTOGRAM,
    "seconds",
    "Time to reconcile one job once, by its backend.",
    (BACKEND,),
    buckets=_RECONCILE_BUCKETS,
)
RECONCILE_ERRORS = Metric(
    "finetune_operator_reconcile_errors_total",
    MetricType.COUNTER,
    "reconciles",
    "Reconciles that failed; each is retried.",
    (BACKEND,),
)
QUEUE_DEPTH = Metric(
    "finetune_operator_queue_depth",
    MetricType.GAUGE,
    "jobs",
    "Jobs that wait to be reconciled, or are being reconciled.",
    (),
)
QUEUE_OLDEST = Metric(
    "finetune_operator_queue_oldest_seconds",
    MetricType.GAUGE,
    "seconds",
    "Time for which the oldest of these jobs has not progressed.",
    (),
)
BACKLOG = Metric(
    "finetune_operator_backlog_jobs",
    MetricType.GAUGE,
    "jobs",
    "Jobs that existed when this replica began to lead, and have not been reconciled since.",
    (),
)
MAX_SERIES = 25_000
"""Most series of the jobs of one namespace on the page, enough for 600 jobs."""

JOBS_NOT_SHOWN = Metric(
    "finetune_operator_jobs_not_shown",
    MetricType.GAUGE,
    "jobs",
    f"Jobs without series, because the jobs of their namespace have {MAX_SERIES} series already; "
    "absent for other namespaces. Running and older jobs are shown first.",
    (Label("namespace"),),
)
JOB_INFO = Metric(
    "finetune_job_info",
    MetricType.GAUGE,
    "jobs",
    "Description of a job; always 1. gpus counts the GPUs of all its nodes.",
    (*OF_JOB, BACKEND, Label("strategy"), Label("model"), Label("gpus"), Label("queue")),
)
JOB_PHASE = Metric(
    "finetune_job_status_phase",
    MetricType.GAUGE,
    "jobs",
    "1 for the phase that a job is in, 0 for the others.",
    (*OF_JOB, Label("phase", tuple(JobPhase))),
)
WALLCLOCK = Metric(
    "finetune_job_wallclock_seconds",
    MetricType.GAUGE,
    "seconds",
    "Where a job's time went since it was created; the categories sum to its age, or to what it "
    "was at its end. A category that is absent is 0. Not a counter, because a new leader "
    "may classify a moment differently.",
    (*OF_JOB, CATEGORY),
)
GPU_SECONDS = Metric(
    "finetune_job_gpu_seconds",
    MetricType.GAUGE,
    "seconds",
    "Seconds of the job multiplied by the GPUs of the nodes that ran.",
    (*OF_JOB, CATEGORY),
)
RESTARTS = Metric(
    "finetune_job_restarts_total",
    MetricType.COUNTER,
    "attempts",
    "Attempts that another attempt followed, by failure class.",
    (*OF_JOB, Label("reason", RESTARTED)),
)
LAST_RECOVERY = Metric(
    "finetune_job_last_recovery_seconds",
    MetricType.GAUGE,
    "seconds",
    "Time from the newest loss of ranks until they trained again.",
    OF_JOB,
)
CHECKPOINT_AGE = Metric(
    "finetune_job_checkpoint_age_seconds",
    MetricType.GAUGE,
    "seconds",
    "Time since the newest checkpoint was committed, while the job has not ended.",
    OF_JOB,
)
PROGRESS_RATIO = Metric(
    "finetune_job_progress_ratio",
    MetricType.GAUGE,
    "ratio",
    "Share of the optimizer steps that are done, as last written into the status.",
    OF_JOB,
)
ETA = Metric(
    "finetune_job_eta_seconds",
    MetricType.GAUGE,
    "seconds",
    "Time to the last step, as last written into the status.",
    OF_JOB,
)
SUSPECT = Metric(
    "finetune_job_suspect",
    MetricType.GAUGE,
    "ranks",
    "Ranks that hold the running attempt back; always 1, and absent for all others.",
    (*OF_JOB, Label("node"), Label("rank"), Label("cause", tuple(SuspectCause))),
)
TIME_TO_FIRST_STEP = Metric(
    "finetune_job_time_to_first_step_seconds",
    MetricType.HISTOGRAM,
    "seconds",
    "Time from a job's creation to its first optimizer step.",
    (BACKEND,),
    buckets=_WAIT_BUCKETS,
)
QUEUE_WAIT = Metric(
    "finetune_job_queue_wait_seconds",
    MetricType.HISTOGRAM,
    "seconds",
    "Time that a job was queued before its first step, or its end.",
    (BACKEND,),
    buckets=_WAIT_BUCKETS,
)
RECOVERY = Metric(
    "finetune_job_recovery_seconds",
    MetricType.HISTOGRAM,
    "seconds",
    "Time from a loss of ranks until they trained again.",
    (BACKEND,),
    buckets=_WAIT_BUCKETS,
)
ENDS = Metric(
    "finetune_job_ends_total",
    MetricType.COUNTER,
    "jobs",
    "Jobs that ended; Deleting counts jobs that were deleted before their end.",
    (BACKEND, Label("phase", (JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.DELETING))),
)
ENDED_WALLCLOCK = Metric(
    "finetune_job_ended_wallclock_seconds_total",
    MetricType.COUNTER,
    "seconds",
    "Time of finished jobs by category.",
    (BACKEND, CATEGORY),
)
ENDED_GPU = Metric(
    "finetune_job_ended_gpu_seconds_total",
    MetricType.COUNTER,
    "seconds",
    "Seconds of the job multiplied by the GPUs of the nodes that ran.",
    (BACKEND, CATEGORY),
)


def _of_job(metric: Metric) -> Metric:
    return replace(metric, labels=(*OF_JOB, *metric.labels))


RANK_ZERO_STEP = _of_job(trainer.GLOBAL_STEP)
RANK_ZERO_LOSS = _of_job(trainer.LOSS)
RANK_ZERO_TOKENS = _of_job(trainer.TOKENS_PER_SECOND)
RANK_ZERO_AGE = _of_job(trainer.LAST_SEEN_AGE)

OF_OPERATOR = (
    LEADER,
    BUILD_INFO,
    API_REQUESTS,
    RECONCILE_DURATION,
    RECONCILE_ERRORS,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    BACKLOG,
    JOBS_NOT_SHOWN,
)
"""Metrics of the operator's own work, in the order of the page."""

OF_JOBS = (
    JOB_INFO,
    JOB_PHASE,
    WALLCLOCK,
    GPU_SECONDS,
    RESTARTS,
    LAST_RECOVERY,
    CHECKPOINT_AGE,
    PROGRESS_RATIO,
    ETA,
    SUSPECT,
)
"""Metrics of each job, exported by the leader only, in the order of the page."""

OF_FLEET = (TIME_TO_FIRST_STEP, QUEUE_WAIT, RECOVERY, ENDS, ENDED_WALLCLOCK, ENDED_GPU)
"""Metrics of all jobs of a backend, including jobs that start and finish between two scrapes."""

OF_RANK_ZERO = (RANK_ZERO_STEP, RANK_ZERO_LOSS, RANK_ZERO_TOKENS, RANK_ZERO_AGE)
"""Metrics of rank 0 for jobs whose pages cannot be scraped; named as on those pages."""

ALL = (*OF_OPERATOR, *OF_FLEET, *OF_JOBS, *OF_RANK_ZERO)
"""All metrics of the operator's page, in its order."""
