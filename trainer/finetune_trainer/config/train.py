"""`TrainConfig`: the whole configuration of one attempt."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from finetune_trainer.config.contract_model import ContractModel, JobRef
from finetune_trainer.config.inputs import DataConfig, ModelConfig
from finetune_trainer.config.training import MethodConfig, TrainingConfig

# Values that differ between nodes are in environment variables, so that all nodes have the same
# TrainConfig.
ENV_NODE_RANK = "FINETUNE_NODE_RANK"  # 0 to nnodes - 1; JOB_COMPLETION_INDEX also works
ENV_NODE_NAME = "FINETUNE_NODE_NAME"  # name in the cluster; default: the host's name
ENV_RDZV_ENDPOINT = "FINETUNE_RDZV_ENDPOINT"  # HOST:PORT of node 0's rendezvous store
ENV_RDZV_KEY = "FINETUNE_RDZV_KEY"  # secret with which the nodes of an attempt know each other
ENV_TERMINATION_PATH = "FINETUNE_TERMINATION_PATH"  # overrides TrainConfig.termination_path
ENV_VOLUMES = "FINETUNE_VOLUMES"  # mount paths of the volumes, as in PATH; links may not leave them


class WorldConfig(ContractModel):
    """Processes that train together; the trainer checks that it got exactly these."""

    nnodes: Annotated[int, Field(ge=1)] = 1
    nproc_per_node: Annotated[int, Field(ge=1)] = 1
    device: Literal["cpu", "cuda"] = "cpu"
    threads_per_process: Annotated[int, Field(ge=1)] = 1
    restarts_in_place: Annotated[int, Field(ge=0)] = Field(
        0,
        description="How often the main process of a node restarts its ranks after a fault, before "
        "it gives up and ends with the fault's exit code.",
    )
    rdma_required: bool | None = Field(
        None, description="Refuse a new run in which NCCL uses TCP sockets; cuda only."
    )

    @model_validator(mode="after")
    def _only_one_node_restarts_in_place(self) -> Self:
        if self.restarts_in_place and self.nnodes > 1:
            raise ValueError(
                f"spec.restartPolicy.restartsInPlace {self.restarts_in_place} is not possible with "
                f"{self.nnodes} nodes, because no node sees the ranks of another end; set it to 0: "
                "the operator restarts the whole gang"
            )
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks: `nnodes * nproc_per_node`."""
        return self.nnodes * self.nproc_per_node


class StrategyConfig(ContractModel):
    """How the ranks share one model."""

    type: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"] = "ddp"
    offload: Literal["none", "optimizer", "cpu", "nvme"] = Field(
        "none",
        description="State outside the device: the optimizer's state, parameters as well (cpu), or "
        "both in files (nvme).",
    )
    nvme_path: str | None = Field(None, description="Folder for the files of offload nvme.")
    replicas: Annotated[int, Field(ge=1)] = Field(
        1, description="HSDP: groups of ranks that each hold the whole model; fsdp only."
    )
    reshard_after_forward: bool | None = Field(
        None, description="fsdp: free gathered layers after forward; None decides by free memory."
    )
    reduce_each_micro_batch: bool | None = Field(
        None, description="fsdp: never hold whole gradients; None decides by free memory."
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        0, description="fsdp: layers gathered ahead; 0 leaves it to torch."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = "none"

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.type == "ddp" and self.offload != "none":
            raise ValueError("spec.strategy.offload has no effect with ddp; use fsdp or zero1-3")
        if self.offload == "nvme" and self.nvme_path is None:
            raise ValueError(
                "spec.strategy.offload nvme needs spec.strategy.nvmePath, the folder of its files"
            )
        if self.offload != "nvme" and self.nvme_path is not None:
            raise ValueError(
                f"spec.strategy.nvmePath {self.nvme_path} has no effect with spec.strategy.offload "
                f"{self.offload}; remove it or use offload nvme"
            )
        if self.offload == "nvme" and self.type != "zero3":
            raise ValueError("spec.strategy.offload nvme needs spec.strategy.type zero3")
        if self.offload == "cpu" and self.type in ("zero1", "zero2"):
            raise ValueError(
                f"spec.strategy.offload cpu has no effect with {self.type}, which does not shard "
                "parameters; use offload optimizer, or zero3"
            )
        if self.offload == "optimizer" and self.type == "fsdp":
            raise ValueError(
                "spec.strategy.offload optimizer is not possible with fsdp, which moves parameters "
                "and optimizer together; use offload cpu"
            )
        if self.type != "fsdp" and (
            self.replicas > 1
            or self.prefetch
            or (self.reshard_after_forward, self.reduce_each_micro_batch) != (None, None)
        ):
            raise ValueError(
                "spec.strategy.replicas, reshardAfterForward, reduceEachMicroBatch and prefetch "
                "need spec.strategy.type fsdp"
            )
        return self


class AutoConfig(ContractModel):
    """Settings that the trainer chooses by memory when the attempt starts.

    In the other sections they have the values with which the choice begins.
    """

    settings: Annotated[
        tuple[Literal["strategy", "activationCheckpointing", "microBatchSize", "precision"], ...],
        Field(min_length=1),
    ]
    peak_at_most: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Bytes of a step on each rank; an earlier attempt that needed more ran out of "
        "memory.",
    )
    usable_bytes: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Memory of each rank; None reads it from the GPU."
    )


class CheckpointConfig(ContractModel):
    """Location and frequency of checkpoints, and the checkpoint to start from."""

    dir: str
    enabled: bool = Field(True, description="False: no checkpoints, and no disk space needed.")
    every_steps: Annotated[int, Field(ge=1)] | None = None
    every_seconds: Annotated[int, Field(ge=1)] | None = None
    mean_time_between_failures: Annotated[float, Field(gt=0)] = Field(
        86_400.0,
        description="Seconds; with the measured cost of a save it determines the interval (Young, "
        "Daly) if neither everySteps nor everySeconds is set.",
    )
    keep: Annotated[int, Field(ge=1)] = 2
    resume_from: str = Field("auto", description="auto, none, or the folder of one checkpoint.")
    is_continued: bool = Field(
        False,
        description="A later attempt of the same job: its own commits count as well, whatever "
        "resumeFrom is.",
    )
    allow_foreign: bool = Field(
        False,
        description="resumeFrom may name a checkpoint of another job; checkpoints of a job that "
        "this job takes over are always allowed.",
    )


class OutputConfig(ContractModel):
    """Exported files and their location."""

    dir: str
    format: Literal["adapter", "merged", "both"] = "adapter"
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="Of a whole model; None takes the dtype of the base model's files, or float32 "
        "if less than 95 % of the update of full fine-tuning would survive the rounding.",
    )

    @model_validator(mode="after")
    def _adapters_have_a_dtype_of_their_own(self) -> Self:
        if self.format == "adapter" and self.dtype is not None:
            raise ValueError(
                f"spec.output.dtype {self.dtype} has no effect with spec.output.format adapter; "
                "use merged or both, or remove it"
            )
        return self


MAX_PROFILED_STEPS = 10


class ProfileConfig(ContractModel):
    """Steps of which ranks write a torch.profiler trace."""

    first_step: Annotated[int, Field(ge=1)]
    last_step: Annotated[int, Field(ge=1)]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    stacks: bool = Field(False, description="Add the Python stack of each operator.")
    memory: bool = Field(
        False,
        description="Record the stacks of GPU memory allocations, and write a memory snapshot "
        "after the steps and on OutOfMemory; cuda only.",
    )
    nvtx: bool = Field(
        False,
        description="Mark the phases for Nsight Systems, which then records the GPU in place of "
        "torch.profiler; cuda only.",
    )

    @model_validator(mode="after")
    def _steps_are_few(self) -> Self:
        steps = f"spec.observability.profile.steps {self.first_step}-{self.last_step}"
        if self.last_step < self.first_step:
            raise ValueError(f"{steps} ends before it begins; write FIRST-LAST")
        if self.last_step - self.first_step >= MAX_PROFILED_STEPS:
            raise ValueError(
                f"{steps} has more than {MAX_PROFILED_STEPS} steps, whose trace no viewer could "
                "open; choose fewer"
            )
        return self


class TrackerConfig(ContractModel):
    """An experiment tracker that gets the curves of the run from a process beside the ranks."""

    type: Literal["wandb", "mlflow"]
    project: str = Field(description="Project of W&B, or experiment of MLflow.")
    entity: str | None = Field(None, description="User or team of W&B.")
    url: str | None = Field(
        None,
        description="Address of the server. None takes it and the credentials from the variables "
        "WANDB_* or MLFLOW_*, which are ignored otherwise.",
    )
    credentials_path: str | None = Field(
        None, description="File with W&B's API key, or with a token or USER:PASSWORD for MLflow."
    )


class TelemetryConfig(ContractModel):
    """Reports of the run during training."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        9400, description="First port tried for the page of a node; 0 for no page."
    )
    metrics_host: str = "127.0.0.1"
    gpu_metrics: Literal["own", "dcgm", "none"] = Field(
        "own",
        description="Source of GPU metrics: page of the node, NVIDIA's DCGM exporter, or none.",
    )
    sample_prompts: tuple[str, ...] = Field(
        (), description="Prompts for responses before and after training."
    )
    collective_timings: bool = Field(
        False, description="Time NCCL's collectives on the GPU; cuda only."
    )
    profile: ProfileConfig | None = Field(
        None, description="Steps to profile; None profiles only on request."
    )
    trackers: tuple[TrackerConfig, ...] | None = Field(
        None, description="Experiment trackers, each type at most once."
    )


class ControlConfig(ContractModel):
    """Stop requests and hang detection."""

    hang_seconds: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Longest time without progress before all stacks are dumped and it ends; "
        "tokenising and exporting may take longer. On GPUs None means 20 times the median step, "
        "300 to 900 s, for steps alone.",
    )
    collective_timeout_seconds: Annotated[int, Field(ge=1)] = Field(
        1_800,
        description="Longest time a rank waits for another in a collective. Work of a single rank "
        "may take longer: the others wait for it elsewhere, and detect if that rank is gone.",
    )
    scheduled_events_url: str | None = Field(
        None, description="Azure Scheduled Events endpoint to poll; None for no polling."
    )


class TrainConfig(ContractModel):
    """Complete configuration of one attempt; only the settings in `auto` are still to choose."""

    version: Literal["v1alpha1"] = "v1alpha1"
    job: JobRef
    world: WorldConfig = WorldConfig()
    model: ModelConfig
    data: DataConfig
    method: MethodConfig
    strategy: StrategyConfig = StrategyConfig()
    training: TrainingConfig
    auto: AutoConfig | None = Field(None, description="None: all settings are chosen.")
    checkpoint: CheckpointConfig
    output: OutputConfig
    telemetry: TelemetryConfig = TelemetryConfig()
    control: ControlConfig = ControlConfig()
    run_dir: str = Field(description="Folder of progress.json, logs/ and TensorBoard events.")
    termination_path: str = Field(description="File of the termination message, as JSON.")
    termination_grace_seconds: Annotated[int, Field(ge=1)] = 120
    take_over: bool = Field(
        False,
        description="Continue in the folders of an earlier job of the same namespace and name, "
        "which is gone.",
    )
    listing_lag_seconds: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="How long a new file may be missing from a listing of its folder; None means 0 "
        "on a local disk and 2 on any other file system.",
    )

    @property
    def reads_gpus(self) -> bool:
        """Whether the page of each node reads the GPUs of that node."""
        return self.world.device == "cuda" and self.telemetry.gpu_metrics == "own"

    @model_validator(mode="after")
    def _batch_divides_over_ranks(self) -> Self:
        divisor = self.world.world_size * self.training.micro_batch_size
        if self.training.global_batch_size % divisor:
            raise ValueError(
                f"spec.training.globalBatchSize {self.training.global_batch_size} is not a "
                f"multiple of {divisor} ({self.world.world_size} ranks x micro-batch "
                f"{self.training.micro_batch_size})"
            )
        return self

    @model_validator(mode="after")
    def _memory_to_choose_by_is_known(self) -> Self:
        if self.auto is not None and self.auto.usable_bytes is None and self.world.device == "cpu":
            raise ValueError(
                "auto has no effect on a CPU, whose memory is not a rank's own; remove it, or set "
                "auto.usableBytes"
            )
        return self

    @model_validator(mode="after")
    def _timings_are_of_gpus(self) -> Self:
        if self.telemetry.collective_timings and self.world.device == "cpu":
            raise ValueError(
                "spec.observability.collectiveTimings needs GPUs; remove it: collectives between "
                "CPUs are always timed"
            )
        return self

    @model_validator(mode="after")
    def _profile_is_of_this_world(self) -> Self:
        profile = self.telemetry.profile
        if profile is None:
            return self
        field, last = "spec.observability.profile", self.world.world_size - 1
        if max(profile.ranks) > last:
            raise ValueError(
                f"{field}.ranks has {max(profile.ranks)}, but the ranks are 0 to {last}; remove it"
            )
        for name in ("memory", "nvtx"):
            if getattr(profile, name) and self.world.device == "cpu":
                raise ValueError(f"{field}.{name} needs GPUs; remove it")
        return self

    @model_validator(mode="after")
    def _full_fine_tuning_has_no_adapter(self) -> Self:
        if self.method.type == "full" and self.output.format != "merged":
            raise ValueError(
                f"spec.output.format {self.output.format} needs spec.method.type lora; use merged "
                "for the whole model"
            )
        return self

    @model_validator(mode="after")
    def _8_bit_moments_are_possible(self) -> Self:
        if self.training.optimizer == "adamw":
            return self
        wants = None
        if self.training.precision != "bf16":
            wants = f"spec.training.precision bf16, not {self.training.precision}"
        elif self.method.type != "full":
            wants = f"spec.method.type full, not {self.method.type}"
        elif self.strategy.type.startswith("zero"):
            wants = f"spec.strategy.type fsdp or ddp, not {self.strategy.type}"
        if wants:
            raise ValueError(f"spec.training.optimizer adamw8bit needs {wants}; or use adamw")
        return self

    @model_validator(mode="after")
    def _early_stopping_has_evaluations(self) -> Self:
        has_them = self.training.eval_every_steps is not None and bool(self.data.held_out)
        if self.training.early_stopping is not None and not has_them:
            raise ValueError(
                "spec.training.earlyStopping has no effect without evaluations; set "
                "spec.training.evalEverySteps and spec.dataset.evalShare or evalSource, or remove "
                "it"
            )
        return self

    def continued(self) -> Self:
        """Return the configuration for a start that may resume from the job's own checkpoints."""
        checkpoint = self.checkpoint.model_copy(update={"is_continued": True})
        return self.model_copy(update={"checkpoint": checkpoint})

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of a rank per optimizer step."""
        ranks = self.world.world_size * self.training.micro_batch_size
        return self.training.global_batch_size // ranks
