"""Labels that lead from an object of a backend to its job, an annotation, and a job's finalizer.

The operator's caches keep these labels and this annotation.
"""

JOB_LABEL = "finetune.dev/job"
"""Name of the job; with the object's namespace it is the key that its events requeue."""

JOB_UID_LABEL = "finetune.dev/job-uid"
"""Uid of the job; children without it are not watched."""

ATTEMPT_LABEL = "finetune.dev/attempt"
"""Number of the attempt."""

GRACE_ANNOTATION = "finetune.dev/grace-seconds"
"""On each pod: its time between SIGTERM and SIGKILL, unless a deletion sets another.

The only annotation of a pod that the caches keep: another is the trainer's whole configuration.
"""

FINALIZER = "finetune.dev/backend"
"""Keeps a deleted job while something of it may run outside of the cluster; only on such jobs."""
