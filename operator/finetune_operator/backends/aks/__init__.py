"""The aks backend: one Indexed Job per attempt, on the nodes that a FineTuneProfile chooses."""
