"""Where attempts run: the contract in `base`, the registry, and a package per built-in backend."""
