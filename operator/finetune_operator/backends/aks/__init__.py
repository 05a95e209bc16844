"""The aks backend: runs each attempt as one Indexed Job, on the nodes that a profile selects."""
