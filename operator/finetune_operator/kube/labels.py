"""Labels by which what belongs to a job is found again, on every object a backend creates.

And what else of these objects the operator's caches must not leave out.
"""

JOB_LABEL = "finetune.dev/job"
"""Name of the job; with the object's namespace it is the key that its events wake."""

JOB_UID_LABEL = "finetune.dev/job-uid"
"""Uid of the job; children without it are not watched."""

ATTEMPT_LABEL = "finetune.dev/attempt"
"""Number of the attempt."""

GRACE_ANNOTATION = "finetune.dev/grace-seconds"
"""On each pod: time it has between SIGTERM and SIGKILL unless it is told otherwise.

The one annotation of a pod that is kept: another is the trainer's whole configuration.
"""

FINALIZER = "finetune.dev/backend"
"""Keeps a job while something of it lives outside the cluster; on no other job."""
