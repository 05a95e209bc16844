"""Remove credentials from texts that users or other services wrote. Pure.

The trainer applies it to termination messages and warnings, the operator to statuses, Events,
annotations and responses of services. Each quantifier is bounded, so that the time stays linear
in the length of a hostile text.
"""

import re
from functools import lru_cache

HIDDEN = "…"
_CACHED_LENGTH = 1024

_KEYS = (
    r"(?:[a-z0-9]{1,32}[_-]){0,4}"
    r"(?:sig|signature|password|passwd|pwd|credential|secret|client[_-]?secret|api[_-]?key"
    r"|account[_-]?key|access[_-]?key|shared[_-]?access[_-]?(?:key|signature)"
    r"|secret[_-]?(?:access[_-]?)?key"
    r"|(?:access|api|auth|bearer|hf|hub|id|refresh|sas|security|session|wandb)[_-]?token)"
)
_START = r"(?:\b|(?<=\\[nrt]))"
"""Start of a word, also after an escaped line end or tab."""
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        # A query that signs its web address, also in JSON with \/ and \u0026.
        (
            r"(https?:(?:\\?/){2}[^\s?'\"<>]{1,1024})\?"
            r"(?=[^\s'\"<>]{0,512}?(?:sig|signature|token|key|secret|code|credential|password)=)"
            r"[^\s'\"<>]*",
            r"\1",
        ),
        # User and password of any address, and a user alone in a web address, which may be a token.
        (r"(https?:(?:\\?/){2})[^\s/\\?#@'\"<>]{1,1024}@", rf"\1{HIDDEN}@"),
        (
            r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,15}:(?:\\?/){2})"
            r"[^\s/\\?#@:'\"<>]{0,256}:[^\s/\\?#@'\"<>]{1,1024}@",
            rf"\1{HIDDEN}@",
        ),
        (
            r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----[\s\S]{0,4096}?"
            r"(?:-----END [A-Z ]{0,32}PRIVATE KEY-----|\Z)",
            HIDDEN,
        ),
        (
            r"(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[a-z]{1,16}\s{1,3})?)"
            r"[^\s\"',}]{8,4096}",
            rf"\1{HIDDEN}",
        ),
        (_START + r"(bearer\s{1,3})[a-z0-9._~+/=-]{20,4096}", rf"\1{HIDDEN}"),
        # NAME=VALUE, "name": "value"
        (
            rf"(?:(?<![a-z])|(?<=\\[nrt]))((?:{_KEYS}|(?<!_)token)(?:=|%3D|[\"']\s{{0,3}}:\s{{0,3}})[\"']?)"
            r"[^&\s\"',;}]+",
            rf"\1{HIDDEN}",
        ),
        # Keys of W&B look like commits without their name.
        (
            r"\b((?:api[ _-]?key|password|wandb)[^a-z0-9]{1,8})[0-9a-f]{40}\b",
            rf"\1{HIDDEN}",
        ),
    )
) + tuple(
    (re.compile(pattern), HIDDEN)
    for pattern in (
        _START + r"(?:hf_|api_org_)[A-Za-z0-9]{20,256}\b",
        _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        _START + r"(?:gh[opsur]_|github_pat_)\w{30,256}\b",
        _START + r"wandb_v1_\w{16,256}\b",
        _START + r"eyJ[\w-]{10,4096}\.[\w-]{10,8192}\.[\w-]{0,1024}",  # a JSON Web Token
        r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==(?![A-Za-z0-9+/=])",  # a key of an Azure account
    )
)


def redact(text: str) -> str:
    """Return the text with each credential replaced by an ellipsis; idempotent.

    Credentials are users and passwords in addresses, queries of web addresses, SAS signatures,
    bearer tokens, private keys, values after a name such as `password=`, and the tokens of
    Hugging Face, Azure, AWS, GitHub and W&B.
    """
    return _cached(text) if len(text) <= _CACHED_LENGTH else _redacted(text)


def _redacted(text: str) -> str:
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


_cached = lru_cache(maxsize=1024)(_redacted)
