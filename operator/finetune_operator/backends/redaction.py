"""Remove credentials from texts of a service, for use in statuses, Events and logs. Pure."""

from finetune_trainer.config import redact

LONGEST_TEXT = 1000


def without_secrets(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return a text of a service as one line, shortened, and without credentials."""
    cleaned = " ".join(redact(text).split())
    return cleaned if len(cleaned) <= longest else f"{cleaned[:longest]}…"
