"""The commands of `ftctl`, one per file."""
