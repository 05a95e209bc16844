"""What seeing gloo's collectives takes: the time around the calls that are seen, not in them.

`install` comes before a run is watched. What lies between torch's dispatcher and Python code is not
visible from Python; it is measured once, on an operation that does nothing.
"""

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

from finetune_trainer.telemetry.collectives.intercept import Interception

Call = Callable[..., Any]


class InterceptionClock:
    """Adds up, from `install` on."""

    def __init__(self) -> None:
        self._around = self._within = 0.0
        self._dispatched = 0

    def seconds(self) -> float:
        """Return all of it so far."""
        detour = dispatcher_detour() if self._dispatched else 0.0
        return self._around - self._within + self._dispatched * detour

    def install(self) -> "InterceptionClock":
        """Be around all that is seen from now on."""
        for name in ("_begin_with", "_wait_with", "_reduce_with"):
            setattr(Interception, name, self._timed(getattr(Interception, name), name))
        return self

    def _timed(self, make: Call, name: str) -> Call:
        is_dispatched = name == "_reduce_with"

        def make_timed(watching: Interception, original: Call, *rest: Any) -> Call:
            seen = make(watching, self._within_call(original), *rest)

            def call(*given: Any, **named: Any) -> Any:
                self._dispatched += is_dispatched
                began = perf_counter()
                try:
                    return seen(*given, **named)
                finally:
                    self._around += perf_counter() - began

            return call

        return make_timed

    def _within_call(self, original: Call) -> Call:
        def call(*given: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return original(*given, **named)
            finally:
                self._within += perf_counter() - began

        return call


@cache
def dispatcher_detour(rounds: int = 5, calls: int = 2000) -> float:
    """Return the seconds that an operation takes longer where Python code passes it on."""
    import torch

    def least(call: Call) -> float:
        times = []
        for _ in range(rounds):
            began = perf_counter()
            for _ in range(calls):
                call(tensors)
            times.append(perf_counter() - began)
        return min(times) / calls

    tensors = [torch.zeros(1)]
    library = torch.library.Library("finetune_bench", "DEF")
    library.define("nothing(Tensor[] tensors) -> ()")
    library.impl("nothing", lambda tensors: None, "CPU")
    nothing, below = torch.ops.finetune_bench.nothing.default, torch._C._after_autograd_keyset
    direct = least(nothing)
    library.impl(
        "nothing",
        lambda keys, tensors: nothing.redispatch(keys & below, tensors),
        "AutogradCPU",
        with_keyset=True,
    )
    passed_on = least(nothing)
    library._destroy()
    return max(0.0, passed_on - direct)
