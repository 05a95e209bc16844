"""Remove secrets from texts of a service, for use in statuses, Events and logs. Pure."""

import re

LONGEST_TEXT = 1000
_AFTER_PATH = re.compile(r"(https?:(?:\\?/){2}[^\s?'\"<>]+)\?[^\s'\"<>]*", re.IGNORECASE)
_SIGNATURE = re.compile(r"(?<![a-z])(sig|se|sp|sv|token)=[^&\s\"']+", re.IGNORECASE)


def without_secrets(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text of a service as one line, shortened, and without signatures of URLs."""
    cleaned = " ".join(_SIGNATURE.sub(r"\1=…", _AFTER_PATH.sub(r"\1", text)).split())
    return cleaned if len(cleaned) <= longest else f"{cleaned[:longest]}…"
