"""How a version is published: `make release-check`, `make release-images`, `make release`.

It uses the standard library alone, so that a job that may publish installs nothing.
"""
