"""A small client of the Kubernetes API, which returns JSON objects and raises typed errors."""
