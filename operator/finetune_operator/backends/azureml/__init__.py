"""The azureml backend: one command job per attempt, in the workspace that a profile names."""
