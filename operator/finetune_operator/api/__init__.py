"""The resource `FineTuneJob`: its models, its CRD, and everything that reads a manifest."""
