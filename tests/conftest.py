"""What every test shares: no network, and no time limit for an example."""

import os

from hypothesis import HealthCheck, settings

# Tests never reach for a hub; set before any library reads them, and inherited by every process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# An example takes milliseconds, but may have to wait for the other tests that run.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
