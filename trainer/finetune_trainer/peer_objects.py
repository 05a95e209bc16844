"""Exchange objects with other ranks in a form that cannot contain code.

`world` installs it before the first process group. Own collectives send JSON or tensors. DCP and
torch.compile send pickles with torch's object collectives, which would execute the code in the
pickle of a stranger on every rank.
"""

import builtins
import pickle
from traceback import StackSummary, format_tb
from typing import Any, NoReturn

from finetune_trainer.errors import TrainerError
from finetune_trainer.unpickler import DCP, RECORD, SafeUnpickler

_PLAIN = bool | int | float | str | bytes | None


class PeerUnpickler(SafeUnpickler):
    """Unpickles plans, results and failures of DCP."""

    allowed = RECORD | {
        ("_pickle", "UnpicklingError"),
        ("traceback", "StackSummary"),  # empty, see `PeerPickler`
        (f"{DCP}api", "CheckpointException"),
        (f"{DCP}filesystem", "_StoragePrefix"),
        (f"{DCP}planner", "LoadItemType"),
        (f"{DCP}planner", "LoadPlan"),
        (f"{DCP}planner", "ReadItem"),
        (f"{DCP}planner", "SavePlan"),
        (f"{DCP}planner", "TensorWriteData"),
        (f"{DCP}planner", "WriteItem"),
        (f"{DCP}planner", "WriteItemType"),
        (f"{DCP}storage", "WriteResult"),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the named object if it is allowed; the exceptions of Python are."""
        if module == "builtins" and _is_exception(found := vars(builtins).get(name)):
            return found
        return super().find_class(module, name)

    def refuse(self, what: str) -> NoReturn:
        """Raise an error about the object of another rank."""
        raise TrainerError(
            f"an object that another rank sent {what}; the object was not read. Find out which "
            "pods can connect to the ports of this job's pods"
        )


class PeerPickler(pickle.Pickler):
    """Pickles exceptions as exceptions of Python, with their traceback as a note.

    If the class of an exception were not in the allow-list, rank 0 would refuse the failure of a
    rank in the middle of a collective. Frames are omitted: their class reads a line of any file.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduced form of an exception or a traceback."""
        from torch.distributed.checkpoint.api import CheckpointException

        if isinstance(obj, StackSummary):
            return StackSummary, ()
        if isinstance(obj, BaseException) and not isinstance(obj, CheckpointException):
            return _reduced(obj)
        return NotImplemented


def guard_object_collectives() -> None:
    """Use the allow-list in every object collective of this process."""
    from torch.distributed import distributed_c10d

    distributed_c10d._pickler = PeerPickler
    distributed_c10d._unpickler = PeerUnpickler


def _is_exception(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Exception)


def _reduced(error: BaseException) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """Return class, arguments and notes of an exception that every rank can unpickle."""
    kind: type[BaseException] = type(error)
    args: tuple[Any, ...] = (error,)
    if kind is vars(builtins).get(kind.__name__) or kind is pickle.UnpicklingError:
        args = error.__reduce__()[1]  # type: ignore[assignment]
    if not issubclass(kind, Exception) or not all(isinstance(one, _PLAIN) for one in args):
        kind, args = RuntimeError, (f"{kind.__name__}: {error}",)
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    trace = "".join(format_tb(error.__traceback__))
    return kind, args, {"__notes__": [*notes, trace] if trace else notes}
