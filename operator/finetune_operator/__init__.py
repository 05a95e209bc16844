"""Turn a `FineTuneJob` into training on a backend; importing this package imports no torch."""

__version__ = "0.1.0"
