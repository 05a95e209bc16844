"""The operator's process: watches fill caches and queue jobs, workers reconcile them."""
