"""The azureml backend: runs each attempt as one command job, in the workspace of a profile."""
