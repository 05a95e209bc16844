"""Labels by which what belongs to a job is found again, on every object a backend creates."""

JOB_LABEL = "finetune.dev/job"
"""Name of the job; with the object's namespace it is the key that its events wake."""

JOB_UID_LABEL = "finetune.dev/job-uid"
"""Uid of the job; children without it are not watched."""

ATTEMPT_LABEL = "finetune.dev/attempt"
"""Number of the attempt."""

FINALIZER = "finetune.dev/backend"
"""Keeps a job while something of it lives outside the cluster; on no other job."""
