"""How a version is published: `make release-check`, `make release-images`, `make release`.

The package uses the standard library only, so a job with rights to publish installs no packages.
"""
