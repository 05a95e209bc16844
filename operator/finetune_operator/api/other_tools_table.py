"""The keys of TRL, Axolotl and LLaMA-Factory, each with its field here or the reason for none.

Data alone; `other_tools.py` finds an entry by its key. `PARENT.KEY` is a key that has this meaning
only in the block or list PARENT.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Keys with one meaning.

    Attributes:
        keys: Names of the keys in the other tools.
        fields: Fields of a FineTuneJob with the same purpose; empty if there is none.
        note: How to write these fields, or the reason why there is none.
        is_planned: Whether a later version will have a field.
    """

    keys: tuple[str, ...]
    fields: tuple[str, ...] = ()
    note: str = ""
    is_planned: bool = False


def _write(fields: str, keys: str, note: str = "") -> Entry:
    return Entry(tuple(keys.split()), tuple(f"spec.{one}" for one in fields.split()), note)


def _none(keys: str, reason: str) -> Entry:
    return Entry(tuple(keys.split()), (), reason)


def _not_yet(keys: str, reason: str) -> Entry:
    return Entry(tuple(keys.split()), (), reason, is_planned=True)


_MODEL = (
    _write(
        "model.source",
        "model model_name_or_path model_name base_model base_model_config",
        "hf://ORG/NAME for a model of the hub, file://./FOLDER for a folder",
    ),
    _write("model.revision", "model_revision revision_of_model"),
    _write("model.tokenSecretRef", "hf_hub_token hf_token hf_use_auth_token", "locally HF_TOKEN"),
    _none(
        "trust_remote_code trust_remote_code_model",
        "code in the folder of a model never runs; transformers must know its architecture",
    ),
    _none(
        "model_type tokenizer_type model_class is_llama_derived_model is_mistral_derived_model "
        "is_falcon_derived_model is_qwen_derived_model",
        "the config.json of the model names its classes",
    ),
    _none(
        "tokenizer_config tokenizer_name_or_path use_fast_tokenizer tokenizer_use_fast",
        "the tokenizer is read from spec.model.source",
    ),
    _none(
        "rope_scaling rope_theta model_init_kwargs model_kwargs overrides_of_model_config",
        "the config.json of the model applies; change it in a copy of the folder",
    ),
    _write(
        "model.chatTemplate",
        "chat_template template chat_template_path chat_template_jinja datasets.conversation",
        "the Jinja text, not a name; absent takes the template of the tokenizer",
    ),
    _write("model.chatTemplateArguments", "chat_template_kwargs enable_thinking"),
    _none(
        "default_system default_system_message",
        "a system turn is part of the rows, or a column of its own (spec.dataset.columns.system)",
    ),
    _write(
        "model.addTokens",
        "tokens add_tokens new_special_tokens add_special_tokens additional_special_tokens "
        "special_tokens.additional_special_tokens",
        "a list of tokens that the tokenizer lacks",
    ),
    _none(
        "special_tokens pad_token bos_token eos_token unk_token eot_tokens",
        "the special tokens of the tokenizer apply; new ones are listed in spec.model.addTokens",
    ),
    _none(
        "resize_vocab resize_token_embeddings_to_32x shrink_embeddings",
        "the embeddings grow with spec.model.addTokens",
    ),
)

_DATA = (
    _write(
        "dataset.source",
        "dataset datasets dataset_name dataset_path dataset_mixture dataset_mixer train_file "
        "train_dataset data_files datasets.path datasets.id datasets.data_files",
        "a URI such as file://./rows.jsonl or hf://ORG/NAME; list further data sets in "
        "spec.dataset.also",
    ),
    _write("dataset.source", "dataset_dir media_dir", "the URI contains the folder"),
    _write("dataset.source", "pretraining_dataset", "with spec.dataset.format: text"),
    _none(
        "dataset_config dataset_config_name datasets.config datasets.name",
        "a subset of a hub data set cannot be named; download it and name its files in "
        "spec.dataset.source",
    ),
    _none("datasets.ds_type datasets.trust_remote_code", "the name of a file determines its type"),
    _write("dataset.split", "dataset_train_split dataset_splits train_on_split datasets.split"),
    _write("dataset.evalSplit", "dataset_test_split"),
    _write(
        "dataset.evalShare",
        "val_set_size val_size eval_split_ratio test_split_size test_size",
        "a share of the rows, at most 0.5",
    ),
    _write(
        "dataset.evalSource",
        "test_datasets eval_dataset validation_file",
        "a URI such as file://./held-out.jsonl",
    ),
    _write(
        "dataset.format",
        "formatting data_format datasets.type datasets.formatting",
        "chat, instruction or text",
    ),
    _write("dataset.columns", "datasets.columns", "a mapping of names"),
    _write("dataset.columns.messages", "datasets.field_messages"),
    _write("dataset.columns.system", "datasets.field_system"),
    _write("dataset.columns.instruction", "datasets.field_instruction"),
    _write("dataset.columns.input", "datasets.field_input"),
    _write("dataset.columns.output", "datasets.field_output"),
    _write("dataset.columns.text", "dataset_text_field text_column datasets.field"),
    _none(
        "datasets.message_property_mappings datasets.message_field_role "
        "datasets.message_field_content datasets.roles datasets.tags",
        "turns with role and content, or with from and value, are read; rename other keys",
    ),
    _none(
        "train_on_inputs assistant_only_loss completion_only_loss train_on_prompt mask_history "
        "train_on_eos train_on_eot datasets.roles_to_train datasets.train_on_eos "
        "datasets.train_on_inputs datasets.message_field_training",
        "the turns of the assistant are trained with their stop tokens, in format text every "
        'token; "train": false in a turn or a row excludes it',
    ),
    _write(
        "dataset.weight",
        "datasets.weight datasets.shards interleave_probs mix_strategy max_samples "
        "max_train_samples sample_size",
        "the number of times that a row occurs in an epoch; 0.1 trains a tenth of the rows",
    ),
    _none("max_eval_samples eval_num_beams", "every held-out row is evaluated"),
    _none(
        "dataset_prepared_path tokenized_path overwrite_cache cache_dir dataset_keep_in_memory "
        "skip_prepare_dataset preprocessing_batch_size streaming dataset_kwargs",
        "rows are tokenized before the first step, and stored until model or rows change",
    ),
    _none(
        "preprocessing_num_workers dataset_num_proc dataset_processes dataloader_num_workers "
        "dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last",
        "rows are tokenized on the cores of the node before the first step",
    ),
    _none("shuffle_merged_datasets shuffle curriculum_sampling", "each epoch is shuffled"),
    _none("dataset_exact_deduplication", "every row is trained; delete duplicates from the file"),
    _none("remove_unused_columns", "other columns are not read"),
)

_METHOD = (
    _write("method.type", "use_peft adapter finetuning_type", "full, lora or qlora"),
    _write("method.lora.r", "lora_r lora_rank"),
    _write("method.lora.alpha", "lora_alpha"),
    _write("method.lora.dropout", "lora_dropout"),
    _write(
        "method.lora.targetModules",
        "lora_target_modules lora_target lora_target_linear lora_target_parameters",
        "absent adapts every linear layer except the head",
    ),
    _write("method.lora.rslora", "use_rslora peft_use_rslora lora_use_rslora"),
    _write("method.lora.dora", "use_dora peft_use_dora lora_use_dora"),
    _write("method.lora.startFrom", "lora_model_dir adapter_name_or_path"),
    _none(
        "lora_modules_to_save modules_to_save additional_target",
        "beside the adapters only the rows of spec.model.addTokens are trained",
    ),
    _none(
        "lora_fan_in_fan_out lora_bias lora_task_type lora_layers_to_transform pissa_init "
        "peft_layers_to_transform init_lora_weights peft_init_lora_weights",
        "the adapters have no such setting",
    ),
    _write(
        "method.type method.quantization",
        "load_in_4bit load_in_8bit quantization_bit quantization_method bnb_4bit_quant_type "
        "bnb_4bit_compute_dtype use_bnb_nested_quant double_quantization",
        "qlora, with nf4 for 4 bits or int8 for 8 bits",
    ),
    _write(
        "method.freeze",
        "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model",
        "patterns of the parameters that are not trained, with method type full",
    ),
    _none(
        "stage do_train do_predict predict_with_generate",
        "a job trains on examples; pre-training on text is spec.dataset.format: text",
    ),
    _not_yet(
        "rl beta rl_beta dpo_beta pref_beta pref_loss pref_ftx loss_type reference_model "
        "ref_model reference_adapter max_prompt_length datasets.field_chosen "
        "datasets.field_rejected",
        "preference training is not supported",
    ),
)

_TRAINING = (
    _write("training.maxSeqLength", "max_length max_seq_length sequence_len cutoff_len"),
    _write("dataset.longRows", "excess_length_strategy truncation_mode", "truncate or split"),
    _write(
        "training.packing",
        "packing sample_packing neat_packing eval_packing eval_sample_packing packing_strategy "
        "padding_free multipack_real_batches sample_packing_group_size",
    ),
    _none(
        "pad_to_sequence_len pad_to_multiple_of pad_to_max_length group_by_length length_column",
        "packs are not padded, and the ranks get batches of equal cost",
    ),
    _write("training.epochs", "num_train_epochs num_epochs"),
    _write("training.maxSteps", "max_steps", "or spec.training.epochs, not both"),
    _write(
        "training.microBatchSize training.globalBatchSize",
        "per_device_train_batch_size micro_batch_size auto_find_batch_size",
        "globalBatchSize counts all GPUs and accumulated batches",
    ),
    _write(
        "training.globalBatchSize",
        "gradient_accumulation_steps batch_size train_batch_size",
        "the micro-batch size, times the GPUs, times the accumulated batches; a pack counts as one",
    ),
    _none(
        "per_device_eval_batch_size eval_batch_size eval_accumulation_steps",
        "evaluation forms its batches by the number of tokens",
    ),
    _write("training.learningRate", "learning_rate", "a number such as 2e-4"),
    _write(
        "training.schedule",
        "lr_scheduler_type lr_scheduler",
        "constant, linear or cosine",
    ),
    _none(
        "lr_scheduler_kwargs min_lr_rate min_lr cosine_min_lr_ratio cosine_constant_lr_ratio",
        "linear and cosine decrease to 0",
    ),
    _write(
        "training.warmup",
        "warmup_ratio warmup_steps",
        "a share of the steps if below 1, else a number of steps",
    ),
    _write("training.weightDecay", "weight_decay"),
    _write("training.maxGradNorm", "max_grad_norm"),
    _write("training.optimizer", "optim optimizer", "adamw or adamw8bit"),
    _none(
        "optim_args adam_beta1 adam_beta2 adam_epsilon adam_epsilon2 adafactor",
        "AdamW has betas 0.9 and 0.999 and epsilon 1e-8, the defaults of the other tools",
    ),
    _none(
        "embedding_lr embedding_lr_scale loraplus_lr_ratio lr_groups use_galore use_badam "
        "use_apollo use_muon",
        "all parameters have one learning rate and one optimizer",
    ),
    _none(
        "label_smoothing_factor neftune_noise_alpha noisy_embedding_alpha use_dft_loss",
        "the loss is the cross entropy of the labels",
    ),
    _none(
        "average_tokens_across_devices",
        "the loss is always the mean over all labels of a step, on all ranks",
    ),
    _write("training.seed", "seed data_seed"),
    _write("training.deterministic", "full_determinism"),
    _write(
        "training.precision",
        "torch_dtype dtype bf16 fp16 bfloat16 float16 pure_bf16 mixed_precision downcast_bf16",
        "bf16, fp16 or fp32; absent chooses",
    ),
    _none("tf32", "spec.training.precision determines the arithmetic; bf16 is faster than TF32"),
    _write("training.float8", "fp8 fp8_backend"),
    _write(
        "training.attention",
        "attention attn_implementation flash_attention flash_attn sdp_attention flex_attention "
        "xformers_attention eager_attention s2_attention",
        "absent chooses the fastest implementation that the model supports",
    ),
    _write("training.compile", "torch_compile torch_compile_backend torch_compile_mode"),
    _write(
        "training.liger",
        "use_liger_kernel enable_liger_kernel use_liger plugins liger_rope liger_rms_norm "
        "liger_glu_activation liger_layer_norm flash_attn_rms_norm flash_attn_fuse_mlp "
        "flash_attn_fuse_qkv",
        "all layers of liger-kernel at once",
    ),
    _write(
        "training.fusedHead",
        "liger_fused_linear_cross_entropy liger_cross_entropy flash_attn_cross_entropy "
        "cut_cross_entropy",
        "true by default",
    ),
    _none(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_unsloth use_unsloth_gc",
        "there are no kernels of their own for adapters; spec.training.compile fuses layers",
    ),
    _write(
        "training.evalEverySteps",
        "eval_steps evals_per_epoch eval_strategy evaluation_strategy do_eval",
        "a number of steps; absent evaluates before and after training",
    ),
    _write(
        "training.earlyStopping",
        "early_stopping_patience load_best_model_at_end metric_for_best_model greater_is_better",
        "with patience; the weights with the lowest held-out loss are exported",
    ),
    _none(
        "loss_watchdog_threshold loss_watchdog_patience",
        "only a loss that is not a number ends a run",
    ),
    _write(
        "observability.samplePrompts",
        "eval_table_size eval_table_max_new_tokens eval_max_new_tokens",
        "completed before and after training",
    ),
)

_PARALLELISM = (
    _write(
        "strategy.type",
        "deepspeed deepspeed_config zero_stage fsdp fsdp_config fsdp_version distributed_type "
        "fsdp_sharding_strategy fsdp_config.sharding_strategy",
        "ddp, fsdp, zero1, zero2 or zero3; auto chooses",
    ),
    _write(
        "strategy.offload",
        "offload_optimizer_device offload_param_device fsdp_offload_params "
        "fsdp_config.offload_params fsdp_config.cpu_offload",
        "optimizer, cpu or nvme",
    ),
    _write(
        "strategy.reshardAfterForward",
        "fsdp_reshard_after_forward fsdp_config.reshard_after_forward",
    ),
    _write(
        "strategy.activationCheckpointing",
        "gradient_checkpointing gradient_checkpointing_kwargs use_reentrant use_reentrant_gc "
        "disable_gradient_checkpointing activation_offloading fsdp_activation_checkpointing "
        "fsdp_config.activation_checkpointing",
        "none, selective or full",
    ),
    _none(
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_cpu_ram_efficient_loading "
        "fsdp_limit_all_gathers fsdp_state_dict_type fsdp_sync_module_states fsdp_use_orig_params "
        "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch "
        "fsdp_config.auto_wrap_policy fsdp_config.transformer_layer_cls_to_wrap "
        "fsdp_config.cpu_ram_efficient_loading fsdp_config.state_dict_type "
        "zero3_init_flag zero3_save_16bit_model deepspeed_multinode_launcher",
        "the strategy chooses it",
    ),
    _write("strategy.replicas", "dp_replicate_size", "groups that each shard the whole model"),
    _write("strategy.tensorParallel", "tensor_parallel_size tp_size", "only 1 is supported yet"),
    _not_yet(
        "context_parallel_size sequence_parallel_size sequence_parallel_degree "
        "sequence_parallel_mode cp_size expert_parallel_size",
        "sequences and experts are not divided among GPUs",
    ),
    _write("topology.nodes", "num_machines"),
    _write("topology.gpusPerNode", "num_processes use_cpu ray_num_workers", "0 is the CPU"),
    _none(
        "local_rank machine_rank main_process_ip main_process_port rdzv_backend same_network "
        "main_training_function compute_environment enable_cpu_affinity tpu_env tpu_use_cluster "
        "tpu_use_sudo use_ray ray_run_name ray_storage_path placement_strategy "
        "resources_per_worker",
        "the operator starts the ranks and connects them",
    ),
    _none("debug strict", "there is one mode, which checks every field"),
    _write("deadlines.hangSeconds", "ddp_timeout", "seconds without progress"),
    _none(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend",
        "parameters that no text reaches are found and frozen before the first step",
    ),
)

_OUTPUT = (
    _write(
        "output.uri",
        "output_dir export_dir",
        "a URI such as file://./model; checkpoints go to spec.checkpoint.uri",
    ),
    _write(
        "output.format",
        "merge_lora export_legacy_format save_safetensors export_size export_device",
        "adapter, merged or both, as safetensors",
    ),
    _write("checkpoint.everySteps", "save_steps saves_per_epoch", "a number of steps"),
    _write("checkpoint.keep", "save_total_limit"),
    _write("checkpoint.enabled", "save_strategy", "false writes no checkpoints"),
    _write(
        "checkpoint.resumeFrom",
        "resume_from_checkpoint auto_resume_from_checkpoints",
        "auto, which is the default, none or the URI of a checkpoint",
    ),
    _none(
        "save_only_model save_first_step save_on_each_node",
        "a checkpoint contains all that is required to resume",
    ),
    _none(
        "overwrite_output_dir",
        "a job never overwrites the results of another job; choose another spec.output.uri",
    ),
    _not_yet(
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision hub_model_revision "
        "push_to_hub_revision",
        "upload the folder of spec.output.uri after the run",
    ),
)

_REPORTS = (
    _none(
        "logging_steps logging_strategy logging_first_step log_level plot_loss "
        "disable_tqdm include_tokens_per_second include_num_input_tokens_seen",
        "every step is logged",
    ),
    _none("use_tensorboard logging_dir", "every run writes TensorBoard files"),
    _write(
        "observability.trackers",
        "report_to tracking tracker wandb use_wandb mlflow use_mlflow",
        "a list, such as [{type: wandb, project: NAME}]",
    ),
    _write("observability.trackers[].project", "wandb_project mlflow_experiment_name"),
    _write("observability.trackers[].entity", "wandb_entity"),
    _write("observability.trackers[].url", "wandb_base_url mlflow_tracking_uri"),
    _none(
        "wandb_run_id wandb_watch wandb_log_model wandb_mode hf_mlflow_log_artifacts",
        "spec.observability.trackers get the curves of all attempts as one run",
    ),
    _not_yet(
        "use_comet comet_project_name use_swanlab swanlab_project trackio_space_id",
        "spec.observability.trackers supports wandb and mlflow",
    ),
    Entry(("run_name", "wandb_name"), ("metadata.name",)),
)

TABLE = (*_MODEL, *_DATA, *_METHOD, *_TRAINING, *_PARALLELISM, *_OUTPUT, *_REPORTS)
"""All entries, in the order of a manifest."""
