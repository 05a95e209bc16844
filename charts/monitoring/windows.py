"""Every time that rules, alerts and dashboards go by; all of them can be made shorter at once."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Windows:
    """Times in seconds.

    Attributes:
        interval: between two evaluations of a rule.
        rate: over which rates are taken; at least four times the time between two scrapes.
        share: over which shares of time are taken of what happens now and then, such as a
            checkpoint; alerts on events look back as far.
        past: how far back a job's network is compared with itself.
        silence: shortest time without a step that can be a hang.
        shortly: for which a condition must hold that is seldom wrong.
        lasting: for which one must hold that others may cause for a moment.
        long: for which one must hold that a start or an evaluation causes, too.
    """

    interval: float = 30
    rate: float = 300
    share: float = 1800
    past: float = 21_600
    silence: float = 120
    shortly: float = 60
    lasting: float = 300
    long: float = 900

    def divided(self, by: float) -> "Windows":
        """Return all times divided by a number, for a test that cannot wait as long."""
        return Windows(**{one.name: getattr(self, one.name) / by for one in fields(self)})


def duration(seconds: float) -> str:
    """Return a time as PromQL writes it: `5m`, `90s`, `500ms`."""
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:.0f}ms"


def iso_duration(seconds: float) -> str:
    """Return a time in whole minutes as Azure writes it: `PT5M`.

    Raises:
        ValueError: it is not in whole minutes.
    """
    if seconds % 60:
        raise ValueError(f"{seconds} s are not whole minutes, which Azure's rules need")
    return f"PT{seconds // 60:.0f}M"
