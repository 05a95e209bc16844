"""The local backend: this machine as `nodes` x `processesPerNode`; one process group per node."""
