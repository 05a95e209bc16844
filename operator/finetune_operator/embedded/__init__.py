"""A Kubernetes API server in this process, with the features that the operator and kubectl need."""
