"""Labels and annotations of the objects of a job, and the finalizer of a job.

The operator's caches retain these labels and annotations, and no other annotation of a pod: the
configuration of its trainer is an annotation of up to 200 KiB.
"""

JOB_LABEL = "finetune.dev/job"
"""Name of the job; events of the object requeue the job of this name in its namespace."""

JOB_UID_LABEL = "finetune.dev/job-uid"
"""Uid of the job; children without this label are not watched."""

ATTEMPT_LABEL = "finetune.dev/attempt"
"""Number of the attempt."""

GRACE_ANNOTATION = "finetune.dev/grace-seconds"
"""Grace period of a pod between SIGTERM and SIGKILL, unless a deletion sets another."""

FENCED_ANNOTATION = "finetune.dev/fenced"
"""`true` on a pod whose job writes only to storage that all nodes share, where claims of the next
attempt stop the writes of this pod.
"""

FINALIZER = "finetune.dev/backend"
"""Finalizer that retains a deleted job while its attempt may still run outside the cluster. Other
jobs do not have it.
"""
