"""The aks backend: one Indexed Job an attempt, on the nodes that a FineTuneProfile chooses."""
