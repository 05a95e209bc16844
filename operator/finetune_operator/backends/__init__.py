"""The backends that run attempts: their contract (`base`), the registry, and the built-in ones."""
