"""The operator's process: watches fill caches and wake keys, workers reconcile one key at a time."""
