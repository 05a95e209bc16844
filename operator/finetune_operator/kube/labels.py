"""Labels that lead from an object of a backend to its job, an annotation, and a job's finalizer.

The operator's caches retain these labels and this annotation.
"""

JOB_LABEL = "finetune.dev/job"
"""Name of the job; events of the object requeue the job of this name in its namespace."""

JOB_UID_LABEL = "finetune.dev/job-uid"
"""Uid of the job; children without this label are not watched."""

ATTEMPT_LABEL = "finetune.dev/attempt"
"""Number of the attempt."""

GRACE_ANNOTATION = "finetune.dev/grace-seconds"
"""Grace period of a pod between SIGTERM and SIGKILL, unless a deletion sets another.

The caches retain this annotation of a pod alone: another holds the whole trainer configuration.
"""

FINALIZER = "finetune.dev/backend"
"""Retains a deleted job whose attempt may still run outside the cluster; only on such jobs."""
