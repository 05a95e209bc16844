"""Texts that NCCL and torch have really ended ranks with, as users have reported them.

They cannot be made here without GPUs. Beside each stands the issue on GitHub that it is from.
"""

import signal

import pytest
from torch.distributed import DistBackendError

from finetune_trainer.config import FailureClass
from finetune_trainer.control import classify
from finetune_trainer.launch.last_words import report_of_abort
from finetune_trainer.launch.termination_message import RankExit, choose_termination

# NVIDIA/nccl#2076
REMOTE = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process \
exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
prematurely.
Last error:
socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer"""

# hkproj/pytorch-transformer-distributed#1
NO_ROUTE = """NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled \
system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: Connect to 192.168.19.14<52822> failed : No route to host"""

# pytorch/pytorch#149984
SYSTEM = """NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL \
version 2.25.1
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:

Exception raised from checkForNCCLErrorsInternal at /pytorch/torch/csrc/distributed/c10d/\
ProcessGroupNCCL.cpp:2501 (most recent call first):"""

# deepseek-ai/DeepEP#106
INFINIBAND = """NCCL error: remote process exited or there was a network error, NCCL version 2.20.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
prematurely.
Last error:
NET/IB : Got completion from peer 172.21.17.89<38536> with error 5, opcode 48, len 32710, \
vendor err 249"""

# The watchdog of ProcessGroupNCCL, torch 2.7 to 2.9
WATCHDOG = """[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=78, \
OpType=SCATTER, NumelIn=29360128, NumelOut=0, Timeout(ms)=1800000) ran for 1800009 milliseconds \
before timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:760\
 (most recent call first):"""

# NVIDIA-NeMo/Speech#14399
STORE = """[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d \
key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: \
/default_pg/0//cuda//0"""

# hiyouga/LlamaFactory#3698
STORE_SOCKET = """[4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via \
c10d key-value store by key '0', but store->get('0') got error: Socket Timeout"""

# torch/csrc/distributed/c10d/NCCLUtils.cpp and Utils.hpp
ABORTED = "NCCL communicator was aborted on rank 1. "
INITIALISATION = "NCCL timeout in communicator initialization."
STORE_GONE = (
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or "
    "crash?"
)
# gloo/transport/tcp/unbound_buffer.cc
PAIR = "Application timeout caused pair closure"

# gloo as well, seen with torch 2.13
GLOO = """[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] \
Timed out waiting 5000ms for recv operation to complete"""

# vllm-project/vllm#14537
SHARED_MEMORY = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled \
system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 7340384)"""

# NVIDIA/nccl#1410
CUDA = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error \
(run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 1 'invalid argument'"""

# the same, with what NVIDIA/nccl#1235 and THUDM/slime#956 report of memory
NO_MEMORY = CUDA.replace("Cuda failure 1 'invalid argument'", "Failed to CUDA calloc 6291456 bytes")
NO_MEMORY_EITHER = CUDA.replace("Cuda failure 1 'invalid argument'", "Cuda failure 'out of memory'")


@pytest.mark.parametrize(
    ("text", "failure_class"),
    [
        pytest.param(REMOTE, FailureClass.WORKER_LOST, id="remote error"),
        pytest.param(NO_ROUTE, FailureClass.WORKER_LOST, id="system error of a connection"),
        pytest.param(SYSTEM, FailureClass.WORKER_LOST, id="system error without more"),
        pytest.param(INFINIBAND, FailureClass.WORKER_LOST, id="InfiniBand"),
        pytest.param(WATCHDOG, FailureClass.HUNG, id="watchdog"),
        pytest.param(GLOO, FailureClass.HUNG, id="gloo's time-out"),
        pytest.param(STORE, FailureClass.WORKER_LOST, id="store does not answer"),
        pytest.param(STORE_SOCKET, FailureClass.WORKER_LOST, id="store's socket"),
        pytest.param(STORE_GONE, FailureClass.WORKER_LOST, id="store gone"),
        pytest.param(ABORTED, FailureClass.WORKER_LOST, id="aborted"),
        pytest.param(INITIALISATION, FailureClass.WORKER_LOST, id="initialisation"),
        pytest.param(PAIR, FailureClass.WORKER_LOST, id="gloo's pair"),
        pytest.param(SHARED_MEMORY, FailureClass.ERROR, id="shared memory"),
        pytest.param(CUDA, FailureClass.ERROR, id="CUDA"),
        pytest.param(NO_MEMORY, FailureClass.OUT_OF_MEMORY, id="no memory for buffers"),
        pytest.param(NO_MEMORY_EITHER, FailureClass.OUT_OF_MEMORY, id="out of memory"),
    ],
)
def test_what_nccl_says_has_its_class(text: str, failure_class: FailureClass) -> None:
    verdict = classify(DistBackendError(text))
    assert verdict.failure_class is failure_class
    is_of_others = failure_class in (FailureClass.WORKER_LOST, FailureClass.HUNG)
    assert verdict.is_collateral == is_of_others


def test_the_sentence_says_what_nccl_adds() -> None:
    assert (
        "/dev/shm/nccl-EoOvZr (size 7340384)" in classify(DistBackendError(SHARED_MEMORY)).message
    )
    assert "No route to host" in classify(DistBackendError(NO_ROUTE)).message
    assert classify(DistBackendError(SYSTEM)).message.endswith("2.25.1; see that rank's log")


# What a process says before its watchdog, a thread of C++, ends it with SIGABRT.
# open-r1 (huggingface/open-r1#620) and instructlab/training#520
TIMED_OUT = """[rank3]:[E502 15:22:50.260494728 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught \
collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, \
Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with \
exception: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, \
OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800011 milliseconds before \
timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632\
 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f83f296c1b6 in libc10.so)
"""

# om-ai-lab/VLM-R1#257: the watchdog itself did not get on
STUCK = """[rank6]:[E429 13:55:49.384620373 ProcessGroupNCCL.cpp:1533] [PG ID 0 PG GUID \
0(default_pg) Rank 6] ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1
[rank6]:[F429 14:03:49.385461578 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 6] \
[PG ID 0 PG GUID 0(default_pg) Rank 6] Terminating the process after attempting to dump debug \
info, due to ProcessGroupNCCL watchdog hang.
"""

# pytorch/pytorch#150916
PEER_GONE = """terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with \
exception: NCCL error: remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting \
prematurely.
Last error:
socketProgress: Connection closed by remote peer ip-172-31-36-217.eu-north-1.compute.internal<59116>
Exception raised from checkForNCCLErrorsInternal at \
/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7861000c31b6 in libc10.so)
"""

# InternLM/lmdeploy#3258
ILLEGAL = """terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with \
exception: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.

Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most \
recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f4c560b9446 in libc10.so)
"""


@pytest.mark.parametrize(
    ("text", "failure_class", "said"),
    [
        pytest.param(TIMED_OUT, "Hung", "ran for 1800011 milliseconds before", id="timed out"),
        pytest.param(STUCK, "Hung", "due to ProcessGroupNCCL watchdog hang;", id="watchdog stuck"),
        pytest.param(PEER_GONE, "WorkerLost", "Connection closed by remote peer", id="peer gone"),
        pytest.param(ILLEGAL, "Error", "(CUDA error: an illegal memory access was", id="CUDA"),
    ],
)
def test_what_is_said_before_an_abort_has_its_class(
    text: str, failure_class: str, said: str
) -> None:
    report = report_of_abort(3, 1.0, f"a line before\n{text}a line after\n")
    aborted = RankExit(rank=3, code=-signal.SIGABRT, time=1.0, report=report)
    termination = choose_termination([aborted], stop_reason=None, is_out_of_memory=False)
    assert (termination.exit_code, termination.failure_class) == (1, failure_class)
    assert said in termination.message
    assert termination.rank == (3 if failure_class == "Error" else None)


def test_an_abort_without_words_says_nothing() -> None:
    assert report_of_abort(0, 1.0, "a warning of some library\n") is None
