"""The operator's process: watches fill caches and wake keys, workers reconcile a key at a time."""
