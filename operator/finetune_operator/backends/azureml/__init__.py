"""The azureml backend: one command job an attempt, in the workspace that a profile names."""
