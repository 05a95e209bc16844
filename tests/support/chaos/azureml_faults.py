"""Faults of a job of the azureml backend, in a workspace that is played in virtual time."""

from collections.abc import Awaitable, Callable

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.errors import TransientError
from finetune_trainer.config import FailureClass
from support.chaos.case import Budget, Case, Truth
from support.chaos.played_workspace import PlayedWorkspace

Act = Callable[[PlayedWorkspace], Awaitable[None]]

DAY = 86_400
PREEMPTION = "PreemptionError: Nodes of this job got pre-empted. Check if it has restarted."


async def cut_off(workspace: PlayedWorkspace) -> None:
    workspace.service.errors["*"] = TransientError("Azure ML does not respond (timeout)")


async def connect(workspace: PlayedWorkspace) -> None:
    workspace.service.errors.clear()


async def lose_nodes(workspace: PlayedWorkspace) -> None:
    """Let Azure ML receive no response from the nodes for a quarter of an hour."""
    workspace.run.set_state("NotResponding")
    await workspace.live(16 * 60, step=5)


async def find_nodes(workspace: PlayedWorkspace) -> None:
    workspace.run.set_state("Running")


async def take_nodes(workspace: PlayedWorkspace) -> None:
    workspace.has_nodes = False


async def give_nodes(workspace: PlayedWorkspace) -> None:
    workspace.has_nodes = True


async def give_nodes_after_a_day(workspace: PlayedWorkspace) -> None:
    await workspace.live(DAY + 600, step=60)
    workspace.has_nodes = True


async def cancel_at_limit(workspace: PlayedWorkspace) -> None:
    workspace.fail_run("Canceled", error={"error": {"code": "", "message": "Job timed out"}})


async def cancel_in_studio(workspace: PlayedWorkspace) -> None:
    workspace.fail_run("Canceled")


async def preempt_run(workspace: PlayedWorkspace) -> None:
    error = {"code": "UserError", "message": PREEMPTION}
    workspace.fail_run("Failed", error={"error": error})


async def queue_again(workspace: PlayedWorkspace) -> None:
    """Let Azure ML start the same run again on another node."""
    workspace.starts += 1
    workspace.run.set_state("Queued")
    await workspace.live(60)


async def service_restarted(workspace: PlayedWorkspace) -> None:
    (attempt,) = workspace.status["attempts"]
    assert attempt["disruptions"] == 1
    assert workspace.lost_steps == 5


def case(fault: str, how: str, truth: Truth, inject: Act, **fields: object) -> Case:
    """Return a case of this backend."""
    return Case(fault, how, truth, inject=inject, backend="azureml", **fields)  # type: ignore[arg-type]


CASES = (
    case(
        "the workspace does not respond",
        "each request fails",
        Truth(
            reason="ServiceSilent",
            words=("does not respond", "its last report was of step"),
            within=150,
        ),
        cut_off,
        repair=connect,
        is_starred=True,
    ),
    case(
        "the nodes do not respond to Azure ML",
        "state NotResponding for 16 minutes",
        Truth(
            reason="NotResponding",
            words=("its nodes do not respond", "its last report was of step"),
            cause=("Azure ML shows the job as NotResponding for more than 15 min",),
            remedy="check its nodes",
        ),
        lose_nodes,
        repair=find_nodes,
    ),
    case(
        "the compute has no nodes, and then has some",
        "state Queued",
        Truth(reason="Queued", words=("waits for nodes in Azure ML's queue",)),
        take_nodes,
        at_step=None,
        repair=give_nodes,
    ),
    case(
        "the compute has no nodes for a day",
        "state Queued for longer than 24 hours",
        Truth(
            reason="Queued",
            words=("waits for nodes in Azure ML's queue",),
            cause=("Azure ML shows the job as Queued for more than",),
            remedy="the quota",
        ),
        take_nodes,
        at_step=None,
        repair=give_nodes_after_a_day,
        is_starred=True,
    ),
    case(
        "Azure ML cancels the run at a limit of its own",
        "state Canceled with the reason of a time limit",
        Truth(
            FailureClass.SERVICE_FAILED,
            budget=Budget.FREE,
            resumes=40,
            words=("Azure ML has cancelled the job at a time limit of its own",),
        ),
        cancel_at_limit,
        is_starred=True,
    ),
    case(
        "a user cancels the run in Studio",
        "state Canceled without a stop by the operator",
        Truth(
            FailureClass.DO_NOT_RESTART,
            words=("a user cancelled the job in Azure ML",),
            remedy="apply it under another name or after deleting this one",
            phase=JobPhase.FAILED,
            final="DoNotRestart",
        ),
        cancel_in_studio,
    ),
    case(
        "a node is preempted, and the run fails",
        "state Failed with PreemptionError",
        Truth(
            FailureClass.PREEMPTED,
            budget=Budget.FREE,
            resumes=40,
            words=("Azure ML has preempted nodes", PREEMPTION),
        ),
        preempt_run,
        is_starred=True,
    ),
    case(
        "a node is lost, and Azure ML starts the run again",
        "state Queued after Running",
        Truth(words=("attempt 1 trains",)),
        queue_again,
        check=service_restarted,
    ),
)
