"""The kubernetes backend: each attempt is one Indexed Job, on nodes that a profile selects."""
