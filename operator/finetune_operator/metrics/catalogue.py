"""Every metric of the operator, declared once with the trainer's `Metric`.

Its page and `docs/reference/metrics.md` follow from here. A series of a job names the job, as the
operator tells of all: whoever scrapes it must keep these labels (`honorLabels`).
"""

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_trainer.config.metrics import Label, Metric, MetricType

BACKEND = Label("backend")
OF_JOB = (Label("namespace"), Label("finetunejob"))

_RECONCILE_BUCKETS = tuple(round(0.001 * 2**k, 3) for k in range(15))

LEADER = Metric(
    "finetune_operator_leader",
    MetricType.GAUGE,
    "replicas",
    "1 while this replica holds the Lease, else 0; only the leader tells of jobs and queue.",
    (),
)
BUILD_INFO = Metric(
    "finetune_operator_build_info",
    MetricType.GAUGE,
    "replicas",
    "Which version runs; always 1.",
    (Label("version"),),
)
API_REQUESTS = Metric(
    "finetune_operator_api_requests_total",
    MetricType.COUNTER,
    "requests",
    "Requests to the API server; code is the HTTP status, 0 where there was no answer.",
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
    "Reconciles that failed, each of which is tried again.",
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
    "How long the oldest of them has not moved.",
    (),
)
BACKLOG = Metric(
    "finetune_operator_backlog_jobs",
    MetricType.GAUGE,
    "jobs",
    "Jobs that were there when this replica began to lead, and have not been reconciled since.",
    (),
)
JOB_INFO = Metric(
    "finetune_job_info",
    MetricType.GAUGE,
    "jobs",
    "What a job is; always 1. gpus is of all its nodes.",
    (*OF_JOB, BACKEND, Label("strategy"), Label("model"), Label("gpus"), Label("queue")),
)
JOB_PHASE = Metric(
    "finetune_job_status_phase",
    MetricType.GAUGE,
    "jobs",
    "1 for the phase that a job is in, 0 for the others.",
    (*OF_JOB, Label("phase", tuple(JobPhase))),
)

OF_OPERATOR = (
    LEADER,
    BUILD_INFO,
    API_REQUESTS,
    RECONCILE_DURATION,
    RECONCILE_ERRORS,
    QUEUE_DEPTH,
    QUEUE_OLDEST,
    BACKLOG,
)
"""Of the operator's own work, in the page's order."""

OF_JOBS = (JOB_INFO, JOB_PHASE)
"""Of jobs, which the leader alone tells of, in the page's order."""
