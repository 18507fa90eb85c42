"""The table of TRL: arguments of GRPOConfig, of its script for GRPO, and of GRPOTrainer and LoraConfig in a script.

A step there is an optimizer step; a step here samples a batch and makes `packing.updates_per_step` optimizer steps of
it. What is counted in steps is converted with that.
"""

from typing import Any

from configs.trainers import trl_values as values
from configs.trainers.translation import ForeignTrainer, KeyRow, Missing, names

BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_processes",
    "generation_batch_size",
    "steps_per_generation",
)
"""What decides how many rollouts are sampled at once; `num_processes` is accelerate's."""
DATASET = ("dataset_name", "dataset_config", "dataset_train_split", "max_tool_calling_iterations")

ROWS = (
    KeyRow("name", ("run_name",)),
    KeyRow("seed", ("seed",)),
    KeyRow(
        "steps",
        ("max_steps", "num_train_epochs"),
        values.whole("max_steps"),
        "a step here samples one batch and makes packing.updates_per_step optimizer steps of it",
    ),
    KeyRow("model.path", ("model_name_or_path",)),
    KeyRow("model.renderer_settings", ("chat_template_kwargs",), values.renderer_settings),
    KeyRow(
        "environments", DATASET, values.environments, "one row of data is one task of the taskset own_data", always=True
    ),
    KeyRow(
        "assignment.groups_per_step",
        (*BATCH, "num_generations"),
        values.groups_per_step,
        "rollouts of all processes in one sampled batch, divided by num_generations; without num_processes, of one",
        always=True,
    ),
    KeyRow("assignment.group_size", ("num_generations",), always=True),
    KeyRow("assignment.shuffle", ("shuffle_dataset",)),
    KeyRow("packing.updates_per_step", ("generation_batch_size", "steps_per_generation"), values.updates_per_step),
    KeyRow("rollout.temperature", ("temperature",)),
    KeyRow("rollout.top_p", ("top_p",)),
    KeyRow("rollout.max_tokens", ("max_completion_length",), values.completion, always=True),
    KeyRow(
        "engine.max_model_len",
        ("vllm_max_model_length", "max_prompt_length", "max_completion_length"),
        values.model_len,
        f"prompt and reply together; {values.PROMPT_TOKENS} tokens of prompt where nothing is said",
        always=True,
    ),
    KeyRow(
        "packing.tokens_per_row", ("vllm_max_model_length",), values.tokens_per_row, "no sample is longer", always=True
    ),
    KeyRow("engine.gpu_memory_utilization", ("vllm_gpu_memory_utilization",)),
    KeyRow("engine.extra_arguments", ("vllm_tensor_parallel_size", "vllm_model_impl"), values.engine_arguments),
    KeyRow("algorithm.type", ("loss_type",), values.algorithm),
    KeyRow("algorithm.length_normaliser", ("loss_type",), values.length_normaliser, "max_completion_length"),
    KeyRow("algorithm.normalise_std", ("scale_rewards",), values.normalise, always=True),
    KeyRow("algorithm.epsilon", ("scale_rewards",), values.epsilon, "what is added to the deviation", always=True),
    KeyRow("filtering.filters", ("mask_truncated_completions",), values.filters, "the filter `truncated` is enforced"),
    KeyRow(
        "training.loss.type",
        ("loss_type", "importance_sampling_level"),
        values.loss,
        "the mean over all tokens of a batch, as in dapo; the ratio is to the engine's own log-probs",
        always=True,
    ),
    KeyRow("training.loss.clip_low", ("epsilon",), values.clip_low, always=True),
    KeyRow(
        "training.loss.clip_high",
        ("epsilon_high", "epsilon"),
        values.clip_high,
        "added to 1, for cispo as well, whose bound there is the weight itself",
        always=True,
    ),
    KeyRow("training.loss.dual_clip", ("delta",)),
    KeyRow("training.learning_rate", ("learning_rate",)),
    KeyRow("training.schedule.type", ("lr_scheduler_type",), values.schedule, always=True),
    KeyRow(
        "training.schedule.min_ratio", ("lr_scheduler_kwargs",), values.scheduler_setting("min_ratio", "min_lr_rate")
    ),
    KeyRow(
        "training.schedule.final_steps",
        ("lr_scheduler_kwargs",),
        values.scheduler_setting("final_steps", "num_decay_steps"),
    ),
    KeyRow(
        "training.decay_steps",
        ("lr_scheduler_type",),
        values.decay_steps,
        "the last of the optimizer steps",
        always=True,
    ),
    KeyRow("training.warmup_steps", ("warmup_steps", "warmup_ratio"), values.warmup, "in optimizer steps"),
    KeyRow("training.optimizer.type", ("optim",), values.optimizer),
    KeyRow("training.betas", ("adam_beta1", "adam_beta2"), lambda given: [given["adam_beta1"], given["adam_beta2"]]),
    KeyRow("training.epsilon", ("adam_epsilon",)),
    KeyRow("training.weight_decay", ("weight_decay",)),
    KeyRow("training.max_grad_norm", ("max_grad_norm",)),
    KeyRow("training.dtype", ("bf16", "fp16"), values.dtype),
    KeyRow("training.device", ("use_cpu",), lambda given: "cpu" if given["use_cpu"] else "auto"),
    KeyRow("training.gradient_checkpointing", ("gradient_checkpointing",), always=True),
    KeyRow("training.lora.rank", ("lora_r", "use_peft"), values.lora("lora_r")),
    KeyRow("training.lora.alpha", ("lora_alpha", "use_peft"), values.lora("lora_alpha")),
    KeyRow("training.lora.dropout", ("lora_dropout",), values.lora("lora_dropout")),
    KeyRow("training.lora.target_modules", ("lora_target_modules",), values.lora("lora_target_modules")),
    KeyRow("evaluation.every", ("eval_strategy", "eval_steps"), values.evaluation_every, "on held-out examples"),
    KeyRow("evaluation.at_start", ("eval_on_start",)),
    KeyRow("evaluation.attempts", ("num_generations_eval",)),
    KeyRow("tracking.type", ("project",), lambda given: "wandb"),
    KeyRow("tracking.project", ("project",), note="nothing is sent: the mode is offline"),
)

MISSING = (
    Missing(
        "no term of the loss draws the policy to its first weights; training.loss.kl_tau holds it to the weights that "
        "sampled",
        names("beta sync_ref_model ref_model_mixup_alpha ref_model_sync_steps use_bias_correction_kl"),
    ),
    Missing(
        "a batch is used once; packing.updates_per_step splits it",
        names("num_iterations"),
        (1,),
    ),
    Missing(
        "a rollout has one reward here: put all parts into one function, my_reward.py, and weigh them there",
        names("reward_funcs reward_weights multi_objective_aggregation reward_processing_classes"),
        ("sum_then_normalize",),
    ),
    Missing(
        "a frozen model that scores replies is asked by the environment",
        names("reward_model_name_or_path"),
    ),
    Missing(
        "tools and several turns belong to an environment; see docs/environments.md",
        names("tools environment_factory"),
    ),
    Missing(
        "sampling has a temperature and top_p; other choices would sample from another distribution than is trained",
        names("top_k min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex"),
        (-1, 1.0, 1),
    ),
    Missing(
        "the ratio of the loss is to the engine's log-probs already; training.loss.tis and "
        "training.loss.sequence_mask bound it",
        names(
            "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
            "vllm_importance_sampling_clip_min vllm_importance_sampling_cap off_policy_mask_threshold"
        ),
    ),
    Missing(
        "no loss of that kind; training.loss.type = 'custom' takes a function of your own",
        names("sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"),
    ),
    Missing(
        "no entropy bonus, and no choice of tokens by entropy",
        names(
            "top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max "
            "entropy_coef_delta entropy_target"
        ),
        (1.0, 1),
    ),
    Missing(
        "losses of a mixture's router are not trained",
        names("router_aux_loss_coef"),
    ),
    Missing(
        "rollouts are always sampled by vLLM, which the run starts and ends itself",
        names(
            "use_vllm vllm_mode vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port "
            "vllm_server_timeout vllm_group_port use_transformers_continuous_batching "
            "transformers_continuous_batching_config use_transformers_paged cache_implementation "
            "ds3_gather_for_generation"
        ),
    ),
    Missing(
        "all of a run is in its store: every rollout, batch and policy; stagecoach export writes weights",
        names(
            "output_dir save_strategy save_steps save_total_limit save_only_model save_on_each_node "
            "load_best_model_at_end metric_for_best_model greater_is_better enable_jit_checkpoint push_to_hub "
            "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
        ),
    ),
    Missing(
        "stagecoach resume goes on with a run",
        names("resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"),
    ),
    Missing(
        "every step and every rollout is recorded: stagecoach show and view; tracking.type = 'wandb' takes figures to "
        "Weights & Biases",
        names(
            "report_to log_completions log_multimodal num_completions_to_print log_unique_prompts "
            "log_completions_hub_repo logging_strategy logging_steps logging_first_step log_on_each_node "
            "logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm "
            "trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics"
        ),
    ),
    Missing(
        "evaluations are on held-out examples, with an interval: the section evaluation",
        names(
            "per_device_eval_batch_size eval_delay prediction_loss_only eval_do_concat_batches eval_use_gather_object "
            "eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval do_train "
            "do_eval do_predict dataset_test_split eval_dataset"
        ),
    ),
    Missing(
        "one process trains, or learner.processes of them, each with a shard of the weights",
        names(
            "accelerator_config parallelism_config deepspeed fsdp fsdp_config ddp_find_unused_parameters "
            "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout local_rank "
            "average_tokens_across_devices full_determinism ignore_bias_buffers"
        ),
    ),
    Missing(
        "the learner has its own kernels and precision: float32 master weights, rows packed without padding",
        names(
            "tf32 dtype attn_implementation cast_lm_head_to_fp32 gradient_checkpointing_kwargs torch_compile "
            "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache "
            "torch_empty_cache_steps auto_find_batch_size pad_to_multiple_of disable_dropout neftune_noise_alpha "
            "label_smoothing_factor optim_args optim_target_modules debug"
        ),
        ("auto",),
    ),
    Missing(
        "the examples are rows of a table, read once by the taskset",
        names(
            "datasets dataset_streaming streaming test_split_size data_seed remove_unused_columns "
            "label_names train_sampling_strategy length_column_name dataloader_drop_last dataloader_num_workers "
            "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
            "dataloader_multiprocessing_context "
            "dataloader_in_order"
        ),
    ),
    Missing(
        "weights are taken as they are in the directory or on the hub; no code beside them is run",
        names("model_init_kwargs trust_remote_code model_revision"),
        ("main",),
    ),
    Missing(
        "adapters here are plain LoRA of linear layers, in full precision",
        names(
            "lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit "
            "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"
        ),
        ("CAUSAL_LM",),
    ),
)

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_generations": 8,
    "max_completion_length": 512,
    "vllm_max_model_length": None,
    "vllm_tensor_parallel_size": 1,
    "vllm_model_impl": "vllm",
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "bf16": None,
    "fp16": False,
    "gradient_checkpointing": True,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
    "chat_template_kwargs": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "use_peft": None,
    "lora_r": 16,
    "lora_alpha": 32,
}

TRAINER = ForeignTrainer("TRL", ROWS, MISSING, DEFAULTS)
