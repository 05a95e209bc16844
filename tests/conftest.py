"""What every test shares: no network."""

import os

# Tests never reach for a hub; set before any library reads them, and inherited by every process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
