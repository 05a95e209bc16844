"""Metrics of the operator and of each job, exported to Prometheus."""
