"""The local backend: runs attempts on this machine, each node as one process group."""
