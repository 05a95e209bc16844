"""A Kubernetes API server in this process, as far as the operator and kubectl need one."""
