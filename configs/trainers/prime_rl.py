"""The table of prime-rl: the keys of `rl.toml`, and of its files for orchestrator, trainer and inference alone.

Keys of a file for one component are read as those of its section in `rl.toml`. Names of earlier versions stand after
those of today.
"""

from typing import Any

from configs.trainers import prime_rl_values as values
from configs.trainers.translation import ForeignTrainer, KeyRow, Missing, names

ROWS = (
    KeyRow("name", names("run.name monitors.wandb.name wandb.name orchestrator.monitors.wandb.name")),
    KeyRow("seed", ("orchestrator.seed",)),
    KeyRow("steps", ("max_steps", "orchestrator.max_steps", "trainer.max_steps")),
    KeyRow("model.path", values.MODEL),
    KeyRow("model.tokenizer", ("tokenizer.name", "orchestrator.tokenizer.name", "trainer.tokenizer.name")),
    KeyRow(
        "model.renderer", ("orchestrator.renderer.name",), values.renderer, "both take names of the package renderers"
    ),
    KeyRow("model.renderer_settings", ("orchestrator.renderer",), values.renderer_settings, "of the same renderer"),
    KeyRow(
        "environments",
        ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env"),
        values.environments,
        'the harness "null" is the default here, chat_loop',
        always=True,
    ),
    KeyRow(
        "assignment.groups_per_step",
        ("orchestrator.batch_size", *values.GROUP_SIZE),
        values.groups_per_step,
        "batch_size counts rollouts, groups_per_step examples",
        always=True,
    ),
    KeyRow("assignment.group_size", values.GROUP_SIZE, always=True),
    KeyRow(
        "assignment.sampler", ("orchestrator.train.source.*.curriculum.sampler",), values.sampler, "of all environments"
    ),
    KeyRow("admission", ("orchestrator.train.source.*.curriculum.gates",), values.admission, "of all environments"),
    KeyRow(
        "assignment.refill",
        ("orchestrator.buffer.online_difficulty_filtering",),
        note="groups of equal rewards are replaced by others",
    ),
    KeyRow("rollout.temperature", ("orchestrator.train.sampling.temperature", "orchestrator.sampling.temperature")),
    KeyRow(
        "rollout.max_tokens",
        names(
            "orchestrator.train.sampling.max_completion_tokens orchestrator.train.sampling.max_tokens "
            "orchestrator.sampling.max_completion_tokens orchestrator.sampling.max_tokens"
        ),
        values.max_tokens,
        "of one turn; without it a reply ends with the context there, here after half of it",
        always=True,
    ),
    KeyRow(
        "rollout.max_off_policy_steps",
        names("orchestrator.max_off_policy_steps max_async_level orchestrator.max_async_level trainer.max_async_level"),
        values.max_off_policy_steps,
        "rollout.weight_update = 'keep' changes weights under rollouts",
        always=True,
    ),
    KeyRow(
        "rollout.max_in_flight",
        names(
            "orchestrator.concurrency.max_inflight orchestrator.max_inflight_episodes "
            "orchestrator.max_inflight_rollouts orchestrator.max_concurrent"
        ),
    ),
    KeyRow("rollout.timeout_seconds", values.TIMEOUT, values.timeout, "of a rollout of any environment"),
    KeyRow("engine.max_model_len", values.MODEL_LEN, values.model_len, "prompt and reply together", always=True),
    KeyRow("engine.dtype", ("inference.vllm.dtype", "inference.model.dtype")),
    KeyRow(
        "engine.gpu_memory_utilization",
        ("inference.vllm.gpu_memory_utilization", "inference.gpu_memory_utilization"),
        note="the learner may share the GPU here: leave room for it",
    ),
    KeyRow(
        "engine.extra_arguments",
        ("inference.vllm.tensor_parallel_size", "inference.parallel.tp"),
        values.engine_arguments,
    ),
    KeyRow("algorithm", ("orchestrator.algo", "orchestrator.advantage"), values.algorithm),
    KeyRow(
        "filtering.filters",
        ("orchestrator.filters", "orchestrator.pre_batch_filters", "orchestrator.post_batch_filters"),
        values.filters,
    ),
    KeyRow("packing.tokens_per_row", values.ROW_LEN, values.tokens_per_row, "tokens of a packed row", always=True),
    KeyRow(
        "packing.zero_advantages",
        ("orchestrator.train.filter_zero_advantages",),
        lambda given: not given["orchestrator.train.filter_zero_advantages"],
        "the opposite of it",
    ),
    KeyRow("packing.data_parallel", ("deployment.num_train_gpus",), note="as many as learner.processes"),
    KeyRow("learner.processes", ("deployment.num_train_gpus",), note="a process for each GPU"),
    KeyRow("training.learning_rate", ("trainer.optim.lr",)),
    KeyRow("training.weight_decay", ("trainer.optim.weight_decay",), always=True),
    KeyRow("training.betas", ("trainer.optim.betas1", "trainer.optim.betas2"), values.betas),
    KeyRow("training.max_grad_norm", ("trainer.optim.max_norm",)),
    KeyRow("training.optimizer.type", ("trainer.optim.type",)),
    KeyRow("training.optimizer.momentum", ("trainer.optim.mu", "trainer.optim.type"), values.momentum),
    KeyRow(
        "training.schedule", ("trainer.scheduler",), values.schedule, "a linear decay there is of the last steps alone"
    ),
    KeyRow("training.decay_steps", ("trainer.scheduler.type",), values.decay_steps, "max_steps"),
    KeyRow("training.warmup_steps", ("trainer.scheduler.warmup_steps", "trainer.scheduler.type"), values.warmup),
    KeyRow("training.loss", ("trainer.loss",), values.loss, "`default` there is dppo"),
    KeyRow("training.gradient_checkpointing", ("trainer.model.ac", "trainer.model.ac_offloading"), lambda given: True),
    KeyRow("training.checkpoint_every", ("trainer.model.ac.freq",)),
    KeyRow("training.offload_activations", ("trainer.model.ac_offloading",), lambda given: True),
    KeyRow("training.lora.rank", ("trainer.model.lora.rank", "trainer.model.lora"), values.lora_rank),
    KeyRow("training.lora.alpha", ("trainer.model.lora.alpha",)),
    KeyRow("training.lora.dropout", ("trainer.model.lora.dropout",)),
    KeyRow("training.lora.target_modules", ("trainer.model.lora.target_modules",)),
    KeyRow(
        "training.save_optimizer_every",
        ("ckpt.interval", "trainer.ckpt.interval"),
        note="weights are kept at each step",
    ),
    KeyRow("evaluation.every", ("orchestrator.eval.interval",), note="on held-out examples of the environments"),
    KeyRow("evaluation.num_examples", ("orchestrator.eval.num_examples",), values.num_evaluated),
    KeyRow("evaluation.attempts", ("orchestrator.eval.group_size", "orchestrator.eval.rollouts_per_example")),
    KeyRow("evaluation.temperature", ("orchestrator.eval.sampling.temperature",)),
    KeyRow(
        "evaluation.at_start",
        ("orchestrator.eval.skip_first_step", "orchestrator.eval.eval_base_model"),
        values.evaluates_at_start,
    ),
    KeyRow("tracking.type", (*values.PROJECT, "wandb.tags"), lambda given: "wandb"),
    KeyRow("tracking.project", values.PROJECT, note="nothing is sent: the mode is offline"),
    KeyRow("tracking.tags", ("wandb.tags",)),
)

MISSING = (
    Missing(
        "only what is trained on is evaluated while a run trains, on held-out examples; `stagecoach eval` takes a "
        "config "
        "with other environments",
        names("orchestrator.eval.source orchestrator.eval.env orchestrator.val orchestrator.eval.retrigger_on_resume"),
    ),
    Missing(
        "an evaluation samples as training does, but for its temperature",
        names("orchestrator.eval.sampling"),
    ),
    Missing(
        "a reply is sampled with temperature and top_p alone; variables of a chat template are settings of the "
        "renderer",
        names("orchestrator.train.sampling orchestrator.sampling"),
    ),
    Missing(
        "a step has a number of examples: assignment.groups_per_step",
        names("orchestrator.token_batch_size"),
    ),
    Missing(
        "rollout.max_in_flight bounds what is under way; adaptive_in_flight lowers it where the engine does not keep "
        "up",
        names(
            "orchestrator.concurrency orchestrator.oversampling_factor orchestrator.tasks_per_minute "
            "orchestrator.pool_size orchestrator.max_concurrent"
        ),
    ),
    Missing(
        "examples are drawn by how hard they were with assignment.sampler.type = 'difficulty_pools'",
        names("orchestrator.buffer"),
    ),
    Missing(
        "how conversations become samples is fixed: a sample for each branch, with the tokens that were sampled",
        names("orchestrator.trajectory_strategy orchestrator.use_token_client orchestrator.training_mode"),
    ),
    Missing(
        "a frozen model is named by the algorithm: algorithm.teacher.path or algorithm.teacher.url",
        names("orchestrator.teacher orchestrator.teacher_rollout_model orchestrator.student teacher_inference"),
    ),
    Missing(
        "the whole of a run is in its store and is found again; `stagecoach resume` goes on, `export` writes weights",
        names(
            "ckpt resume trainer.ckpt orchestrator.ckpt trainer.resume orchestrator.resume output_dir "
            "orchestrator.output_dir trainer.output_dir clean clean_output_dir run trainer.weights"
        ),
    ),
    Missing(
        "processes are started by the run on this machine; docs/prefect.md has SLURM, Kubernetes and several machines",
        names("deployment slurm inference_gpu_ids trainer_gpu_ids inference.deployment inference.slurm dry_run"),
    ),
    Missing(
        "weights reach the engine as files of the store, and rollouts the learner as tables",
        names(
            "weight_broadcast rollout_transport trainer.weight_broadcast orchestrator.weight_broadcast "
            "trainer.rollout_transport orchestrator.rollout_transport inference.weight_broadcast "
            "orchestrator.num_train_workers orchestrator.pad_to_multiple_of orchestrator.env_server_base_port"
        ),
    ),
    Missing(
        "the engine of the run is its own; one of somebody else is named by engine.url",
        names("orchestrator.client orchestrator.model inference.server inference.router inference.api_server_count"),
    ),
    Missing(
        "the learner has its own kernels and parallelism: float32 master weights, sharded over learner.processes",
        names(
            "trainer.model trainer.matmul_precision trainer.enable_router_replay trainer.dist_timeout_seconds "
            "trainer.tokenizer trainer.gc trainer.optim trainer.scheduler enable_fp32_lm_head dist_timeout_seconds"
        ),
    ),
    Missing(
        "vLLM is started with the settings of the section engine; engine.extra_arguments takes others of its command "
        "line",
        names("inference"),
    ),
    Missing(
        "images come with the environment; `training.vision` says whether what looks at them is trained",
        names("model.vlm trainer.model.vlm orchestrator.model.vlm"),
    ),
    Missing(
        "the tokenizer's own template is used, and no code beside the weights is run",
        names("tokenizer orchestrator.tokenizer model"),
    ),
    Missing(
        "the variables of the process that starts the run hold; environments get those that environments.N.variables "
        "names",
        names("env_vars trainer.env_vars orchestrator.env_vars"),
    ),
    Missing(
        "every step and rollout is recorded: stagecoach show, view and logs; tracking.type = 'wandb' takes figures to "
        "Weights & Biases",
        names(
            "log trainer.log orchestrator.log monitors wandb trainer.monitors orchestrator.monitors trainer.wandb "
            "orchestrator.wandb orchestrator.prime_monitor orchestrator.collect_inference_metrics "
            "orchestrator.inference_metrics_roles orchestrator.heartbeat trainer.heartbeat trainer.metrics_server "
            "trainer.enable_token_export trainer.memory_profiler_path trainer.trace_path"
        ),
    ),
    Missing("there is no fake data: a run samples its environments", names("trainer.data data")),
)

DEFAULTS: dict[str, Any] = {
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.seq_len": 2048,
    "trainer.model.seq_len": 2048,
    "trainer.model.lora.rank": 16,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.betas2": 0.999,
    "trainer.optim.lr": 1e-6,
}

TRAINER = ForeignTrainer("prime-rl", ROWS, MISSING, DEFAULTS)
