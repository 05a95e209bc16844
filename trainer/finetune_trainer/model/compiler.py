"""What all uses of torch's compiler share: when both passes are compiled, and why it refused."""

from finetune_trainer.control import is_out_of_memory


def compile_backward_at_once() -> None:
    """Have both passes compiled by the call of what is compiled, for the whole process.

    Else the backward pass is compiled in the first `backward`, which no such call encloses.
    """
    from torch._functorch import config

    config.force_non_lazy_backward_lowering = True


def reason_of(error: Exception) -> str:
    """Return in a sentence why the compiler, which has raised `error`, refused.

    Raises:
        Exception: memory ended; that is no fault of what was to be compiled, and without compiling
            there is no more of it.
    """
    cause: Exception = getattr(error, "inner_exception", error)  # of the backend
    if is_out_of_memory(cause):
        raise cause from error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
