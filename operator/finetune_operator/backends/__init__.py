"""Where attempts run: the contract in `base`, the registry, and one package a built-in backend."""
