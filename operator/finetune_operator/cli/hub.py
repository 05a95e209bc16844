"""Find out whether the hub responds, before a process of the trainer needs it.

The libraries of the trainer retry for a minute and print each attempt. `run`, `preview` and `init`
therefore ask first: without a response the trainer uses the copies of this machine, and an input
without a copy is refused in one sentence.
"""

import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from finetune_operator.api.problems import Problem, Severity
from finetune_operator.backends import registry
from finetune_operator.backends.local.layout import BACKEND, cache_dir
from finetune_operator.cli.target import Target
from finetune_operator.planner.uris import HUB, inputs_of, is_on_hub

SECONDS = 2.5
OFFLINE = "HF_HUB_OFFLINE"  # of huggingface_hub: use only copies
MODEL = "spec.model.source"
_TRUE = {"1", "on", "yes", "true"}  # of huggingface_hub
_GATEWAY_ERRORS = (502, 503, 504)


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether the user has turned the hub off."""
    return environ.get(OFFLINE, "").lower() in _TRUE


def silence(environ: Mapping[str, str], seconds: float = SECONDS) -> str | None:
    """Return why the hub cannot be used, as part of a sentence; None if it responds.

    A response with an error counts: the libraries report it without retrying. So does a failed
    check of a certificate, because they may trust others.
    """
    endpoint = environ.get("HF_ENDPOINT") or "https://huggingface.co"
    # No response within the limit may also be a lookup of the name that hangs, hence the thread.
    found = [f"no response within {seconds:g} s"]
    probe = threading.Thread(target=_probe, args=(endpoint, seconds, found), daemon=True)
    probe.start()
    probe.join(seconds)
    return f"the hub {endpoint} does not respond ({found[-1]})" if found[-1] else None


def _probe(endpoint: str, seconds: float, found: list[str]) -> None:
    """Append the reason why the endpoint does not respond, or an empty text."""
    try:
        request = urllib.request.Request(f"{endpoint}/api/models", method="HEAD")
        urllib.request.urlopen(request, timeout=seconds).close()
        found.append("")
    except urllib.error.HTTPError as error:
        found.append(f"HTTP {error.code}" if error.code in _GATEWAY_ERRORS else "")
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLError):
            found.append("")
        elif not isinstance(reason, TimeoutError):
            text = reason.strerror if isinstance(reason, OSError) else None
            found.append(text or str(reason))
    except TimeoutError:
        pass
    except (OSError, ValueError) as error:  # a broken response, or an endpoint that is not a URL
        found.append(str(error))


def has_copy(name: str, environ: Mapping[str, str], *, is_model: bool) -> bool:
    """Whether this machine may have a copy of a repository of the hub."""
    home = environ.get("HF_HOME")
    if not home:
        cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~"), ".cache"))
        home = str(Path(cache).expanduser() / "huggingface")
    hub = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    kind = "models" if is_model else "datasets"
    repository = Path(hub).expanduser() / "--".join([kind, *name.split("/")])
    if any(repository.glob("snapshots/*/*")):
        return True
    prepared = cache_dir(environ) / "datasets"
    return not is_model and any(_plain(one.name) == _plain(name) for one in prepared.glob("*"))


def _plain(name: str) -> str:
    """Return a name without what `datasets` changes in it for a folder."""
    return "".join(filter(str.isalnum, name.lower()))


def without_silent_hub(target: Target) -> Target:
    """Return a job of this machine that does not wait for a hub that does not respond.

    Raises:
        InvalidJobError: an input on the hub has no copy on this machine.
    """
    inputs = {field: uri for field, uri in inputs_of(target.job).items() if is_on_hub(uri)}
    environ = target.context.environ
    if not inputs or is_offline(environ) or target.job.spec.backend.type != BACKEND:
        return target
    why = silence(environ)
    if why is None:
        return target
    problems = [
        Problem(
            field,
            f"{uri}: {why}, and this machine has no copy; check the network and HF_ENDPOINT, or "
            "name a local path (file://)",
        )
        for field, uri in inputs.items()
        if not has_copy(uri.removeprefix(HUB), environ, is_model=field == MODEL)
    ]
    copies = f"{why}; the copies on this machine are used"
    target.refuse(problems or [Problem(next(iter(inputs)), copies, Severity.WARNING)])
    context = replace(target.context, environ={**environ, OFFLINE: "1"})
    backend = registry.load(target.job.spec.backend.type)(context)
    return replace(target, context=context, backend=backend)
