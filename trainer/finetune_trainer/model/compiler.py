"""Control when torch's compiler compiles the backward pass, and explain its refusals."""

from collections.abc import Callable

from finetune_trainer.control import is_out_of_memory


def compile_backward_at_once() -> None:
    """Compile both passes in the first call of the compiled object, for the whole process.

    Otherwise the backward pass is compiled in the first `backward`, outside of any guarded call.
    """
    from torch._functorch import config

    config.force_non_lazy_backward_lowering = True


def reason_of(error: Exception) -> str:
    """Return the compiler's reason for raising `error`, as one line.

    Raises:
        Exception: out of memory, which is not a fault of the compiled code and which running
            uncompiled would not fix.
    """
    cause: Exception = getattr(error, "inner_exception", error)  # the error of the backend
    if is_out_of_memory(cause):
        raise cause from error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


def report_compilations(report: Callable[[bool], None]) -> None:
    """Call `report` with True when torch begins to compile in this process, and with False after.

    Both calls come from the thread that compiles.
    """
    from torch._dynamo.callback import on_compile_end, on_compile_start

    on_compile_start(lambda _: report(True))
    on_compile_end(lambda _: report(False))
