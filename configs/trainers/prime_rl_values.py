"""Values of prime-rl as values of ours: what is more than another name of the same thing."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.filters import FilteringConfig
from configs.trainers.translation import SAMPLE, Given, NoCounterpart, NotNeeded, names

MODEL = names("model.name trainer.model.name orchestrator.model.name inference.vllm.model inference.model.name")
GROUP_SIZE = names("orchestrator.group_size orchestrator.rollouts_per_example")
MODEL_LEN = names("inference.vllm.max_model_len inference.model.max_model_len orchestrator.seq_len seq_len")
ROW_LEN = names("trainer.model.seq_len seq_len")
MAX_STEPS = names("max_steps orchestrator.max_steps trainer.max_steps")
MAX_TOKENS = names(
    "orchestrator.train.sampling.max_completion_tokens orchestrator.train.sampling.max_tokens "
    "orchestrator.sampling.max_completion_tokens orchestrator.sampling.max_tokens"
)
PROJECT = names("monitors.wandb.project wandb.project orchestrator.monitors.wandb.project")
TIMEOUT = (
    "orchestrator.train.source.*.env.*.timeout.rollout",
    "orchestrator.train.env.*.timeout.rollout",
)
LISTS = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env")
"""Where the environments of training are, today and earlier."""
AGENT = ("harness", "runtime", "max_turns", "sampling", "timeout", "model", "client", "retries")
"""Settings of an agent, by which its table is known among those of an environment."""
SOURCE = frozenset(names("env name ratio algo sampling serve address curriculum id args taskset harness"))
"""Keys of an environment that are read; the others are settings of the run here, or of a pool."""
FILTERS = {each.type: each for each in FilteringConfig().filters}


def section(given: Given, name: str) -> Any:
    """Return what is given below `name` as nested tables and lists of tables; an empty table where there is nothing."""
    tree: dict[str, Any] = {}
    for key, value in given.items():
        if key != name and not key.startswith(f"{name}."):
            continue
        *parents, last = key.removeprefix(name).lstrip(".").split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if last:
            node[last] = value
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    """Return nested tables with lists where items were numbered."""
    if not isinstance(tree, Mapping) or not tree:
        return tree
    found = {key: _with_lists(value) for key, value in tree.items()}
    return [found[key] for key in sorted(found, key=int)] if all(key.isdecimal() for key in found) else found


def renderer(given: Given) -> str:
    """Return the renderer; `auto` goes by the model's name, as an empty one here."""
    if given["orchestrator.renderer.name"] == "auto":
        raise NotNeeded
    return str(given["orchestrator.renderer.name"])


def renderer_settings(given: Given) -> dict[str, Any]:
    """Return the settings of the renderer but its name."""
    settings: dict[str, Any] = section(given, "orchestrator.renderer")
    settings.pop("name", None)
    if not settings:
        raise NotNeeded
    return settings


def groups_per_step(given: Given) -> int:
    """Return the examples of a step, of its rollouts."""
    rollouts, group = int(given["orchestrator.batch_size"]), int(given.first(*GROUP_SIZE))
    if rollouts % group:
        raise NoCounterpart(f"{rollouts} rollouts are no whole number of groups of {group}")
    return rollouts // group


def model_len(given: Given) -> int:
    """Return the longest sample: the engine's limit, and no more than the orchestrator keeps of it."""
    engine = given.first("inference.vllm.max_model_len", "inference.model.max_model_len")
    kept = given.keys_given.get("orchestrator.seq_len", given.keys_given.get("seq_len", 2048))
    return min(int(engine), int(kept)) if engine and "orchestrator.seq_len" in given else int(engine or kept)


def tokens_per_row(given: Given) -> int:
    """Return the length of a packed row, which holds the longest sample."""
    return max(int(given.first(*ROW_LEN, default=2048)), model_len(given))


def max_tokens(given: Given) -> int:
    """Return the most tokens of a reply, which leave room for a prompt."""
    said = given.first(*MAX_TOKENS)
    if said is None or int(said) >= model_len(given):
        return model_len(given) // 2
    return int(said)


def max_off_policy_steps(given: Given) -> int:
    """Return how many steps old rollouts may be: earlier versions said by how many the trainer is behind."""
    async_level = given.first("max_async_level", "orchestrator.max_async_level", "trainer.max_async_level")
    return int(given["orchestrator.max_off_policy_steps"] if async_level is None else async_level)


def timeout(given: Given) -> float:
    """Return the longest time of a rollout that any environment has."""
    found = [value for key, value in given.items() if key.endswith(".timeout.rollout") and ".train." in key]
    return float(max(found))


def engine_arguments(given: Given) -> list[str]:
    """Return arguments for vLLM's command line."""
    size = int(given.first("inference.vllm.tensor_parallel_size", "inference.parallel.tp"))
    if size == 1:
        raise NotNeeded
    return ["--tensor-parallel-size", str(size)]


def algorithm(given: Given) -> dict[str, Any]:
    """Return the run's algorithm."""
    return algorithm_of(given, "orchestrator.algo", section(given, "orchestrator.algo"))


def algorithm_of(given: Given, where: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of an algorithm; what it leaves out is noted under `where`."""
    if not tree:
        raise NoCounterpart("the algorithm is named by orchestrator.algo in newer versions, here by algorithm.type")
    kind = str(tree.get("type", "grpo"))
    found: dict[str, Any] = {"type": kind}
    if "length_penalty" in tree:
        named = {"output": "num_output_tokens_weight", "input": "num_input_tokens_weight", "turns": "num_turns_weight"}
        penalty = tree["length_penalty"]
        found["length_penalty"] = {ours: penalty[theirs] for ours, theirs in named.items() if theirs in penalty}
    if kind == "rae":  # what SPIRAL's authors and prime-rl do, and not the default here
        found |= {"decay": tree.get("decay", 0.95), "key": "agent", "order": "pre"}
    if kind == "hierarchical_grpo":
        found["episode_agents"] = tree.get("episode_agents", ["solver"])
    if kind == "opsd":
        found |= {"demonstration": tree["demo_key"]} if "demo_key" in tree else {}
        found |= {"template": tree["template"]} if "template" in tree else {}
    if kind == "echo":
        found |= _echo(given, where, tree)
    frozen = tree.get("teacher") or (tree.get("sampling") or {}).get("source")
    if isinstance(frozen, Mapping):
        # Scoring is no part of the chat API, so that the address here is that of the server.
        found["teacher"] = {"url": str(frozen.get("base_url", "")).removesuffix("/").removesuffix("/v1")}
        given.drop(f"{where}.teacher.name", f"{frozen.get('name')}: a server is asked for the model that it serves")
    return found


def _echo(given: Given, where: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    roles = tree.get("roles") or {}
    if roles and "tool" not in roles:
        given.drop(f"{where}.roles", "results of tools are learnt as well, unless the command says algorithm.tool=null")
    if "assistant" in roles:
        given.drop(f"{where}.roles.assistant", "the roles here are system, user and tool")
    if "filter" in tree:
        given.drop(
            f"{where}.filter", "a function that narrows the choice is given other arguments: algorithm.keep_mask"
        )
    return {role: {"alpha": roles[role].get("alpha", 0.1)} for role in ("system", "user", "tool") if role in roles}


def filters(given: Given) -> list[dict[str, Any]]:
    """Return the default filters, with `enforce` of those that are given."""
    chosen: dict[str, dict[str, Any]] = {name: {"type": name} for name in FILTERS}
    for place in ("orchestrator.filters", "orchestrator.pre_batch_filters", "orchestrator.post_batch_filters"):
        for index, each in enumerate(section(given, place)):
            kind = str(each.get("type"))
            if kind not in chosen:
                given.drop(f"{place}.{index}", f"there is no filter {kind!r}; they are {', '.join(chosen)}")
            elif "enforce" in each:
                chosen[kind] |= {"enforce": bool(each["enforce"])}
    return list(chosen.values())


def betas(given: Given) -> list[float]:
    """Return AdamW's decay rates."""
    return [given["trainer.optim.betas1"], given["trainer.optim.betas2"]]


def momentum(given: Given) -> float:
    """Return the momentum of Muon; the sign of the gradient has none there."""
    kind = given.first("trainer.optim.type", default="adamw")
    if kind == "sign_sgd":
        return 0.0
    if kind != "muon" or "trainer.optim.mu" not in given:
        raise NotNeeded
    return float(given["trainer.optim.mu"])


def schedule(given: Given) -> dict[str, Any]:
    """Return how the learning rate falls."""
    tree = section(given, "trainer.scheduler")
    kind = tree.get("type", "constant")
    floor = {"min_ratio": float(tree["min_lr"]) / float(given["trainer.optim.lr"])} if tree.get("min_lr") else {}
    if kind == "cosine":
        return {"type": "cosine", **floor}
    if kind == "linear" and int(tree.get("decay_steps", 10)):
        return {"type": "wsd", "final_steps": int(tree.get("decay_steps", 10)), "shape": "linear", **floor}
    return {"type": "constant"}


def decay_steps(given: Given) -> int:
    """Return the step at which the rate has fallen: the last one."""
    if schedule(given)["type"] == "constant":
        raise NotNeeded
    if (steps := given.first(*MAX_STEPS)) is None:
        raise NoCounterpart("the rate falls until max_steps, which is not given: set training.decay_steps")
    return int(steps)


def warmup(given: Given) -> int:
    """Return the steps of warm-up; without a number there are ten, and none of a constant rate."""
    if given.first("trainer.scheduler.type", default="constant") == "constant":
        raise NotNeeded
    return int(given.first("trainer.scheduler.warmup_steps", default=10))


def loss(given: Given) -> dict[str, Any]:
    """Return the loss of the rl component."""
    tree = section(given, "trainer.loss")
    kind = tree.pop("type", "default")
    named = {
        "dppo_mask_low": "mask_low",
        "dppo_mask_high": "mask_high",
        "ipo_threshold": "threshold",
        "kl_tau": "kl_tau",
    }
    if kind not in ("default", "ipo"):
        raise NoCounterpart("a function of your own takes other arguments here; see docs/extending.md, or the losses")
    for key in tree:
        if key not in named and not (key == "adv_tau" and tree[key] == 1):
            given.drop(f"trainer.loss.{key}", "the losses here have no such setting")
    return {"type": "dppo" if kind == "default" else "ipo"} | {named[key]: tree[key] for key in tree if key in named}


def lora_rank(given: Given) -> int:
    """Return the rank of adapters."""
    return int(given["trainer.model.lora.rank"])


def num_evaluated(given: Given) -> int:
    """Return how many held-out examples are tried."""
    if int(given["orchestrator.eval.num_examples"]) < 0:
        raise NoCounterpart("all examples there; here a number, of those that are held out")
    return int(given["orchestrator.eval.num_examples"])


def evaluates_at_start(given: Given) -> bool:
    """Return whether the first policy is evaluated."""
    if "orchestrator.eval.skip_first_step" in given:
        return not given["orchestrator.eval.skip_first_step"]
    return bool(given["orchestrator.eval.eval_base_model"])


def sampler(given: Given) -> dict[str, Any]:
    """Return which examples are tried, by the first environment that says so."""
    tree = next(_curricula(given, "sampler"), {})
    if tree.get("type", "standard") == "standard":
        raise NotNeeded
    pools = [{"name": name, **pool} for name, pool in (tree.get("pools") or {}).items()]
    return {"type": "difficulty_pools"} | (
        {"pools": sorted(pools, key=lambda each: each["threshold"])} if pools else {}
    )


def admission(given: Given) -> dict[str, Any]:
    """Return the gate at which groups are refused, of the first environment that has one."""
    gates = next(_curricula(given, "gates"), {})
    for name, gate in gates.items():
        if gate.get("type", "advantage_range") == "advantage_range":
            return {key: gate[key] for key in ("reject_min", "reject_max") if key in gate}
        given.drop(f"curriculum.gates.{name}", "a gate here refuses a range of advantages: admission")
    raise NotNeeded


def _curricula(given: Given, name: str) -> Iterator[dict[str, Any]]:
    for source in section(given, LISTS[0]):
        if name in (source.get("curriculum") or {}):
            yield source["curriculum"][name]


def environments(given: Given) -> list[dict[str, Any]]:
    """Return the environments that are trained on; where none is named, the rows of a file."""
    found = []
    for place in LISTS:
        for index, source in enumerate(section(given, place)):
            found.append(_environment(given, f"{place}.{index}", source))
    return found or SAMPLE


def _environment(given: Given, where: str, source: Mapping[str, Any]) -> dict[str, Any]:
    env = dict(source.get("env") or {})
    # Earlier versions: the package's id and the arguments of its load_environment, or taskset and harness at the top.
    taskset = env.pop("taskset", source.get("taskset")) or {"id": source.get("id", ""), **(source.get("args") or {})}
    if source.get("args"):
        given.drop(f"{where}.args", "settings of the taskset here; the package may call them otherwise: see its README")
    agents = {name: env.pop(name) for name in [*env] if isinstance(env[name], Mapping) and {*env[name]} & {*AGENT}}
    if "harness" in source:
        agents["agent"] = {"harness": dict(source["harness"]), "runtime": dict(source["harness"]).pop("runtime", {})}
    found: dict[str, Any] = {"name": source.get("name") or taskset["id"], "taskset": dict(taskset)}
    found |= {"env": env} if env else {}
    found |= _seats(given, f"{where}.env", agents)
    if "ratio" in source:
        found["weight"] = source["ratio"]
    if "algo" in source:
        found["algorithm"] = algorithm_of(given, f"{where}.algo", source["algo"])
    found |= _sampling(given, where, source.get("sampling") or {})
    if address := (source.get("serve") or {}).get("address", source.get("address")):
        found["address"] = address
    for key in sorted(source.keys() - SOURCE):
        given.drop(f"{where}.{key}", "a setting of the whole run here, or of environments.N.pool")
    return found


def _sampling(given: Given, where: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    for key in sampling:
        if key != "temperature":
            given.drop(f"{where}.sampling.{key}", "environments of a run differ in temperature alone")
    return {"temperature": sampling["temperature"]} if "temperature" in sampling else {}


def _seats(given: Given, where: str, agents: Mapping[str, Any]) -> dict[str, Any]:
    """Return harness, runtime and turns of the agents: of all where they agree, else of each seat."""
    seats = {name: _seat(given, f"{where}.{name}", agent) for name, agent in agents.items()}
    first = next(iter(seats.values()), {})
    return first if all(each == first for each in seats.values()) else {"seats": seats}


def _seat(given: Given, where: str, agent: Mapping[str, Any]) -> dict[str, Any]:
    seat: dict[str, Any] = {}
    harness, runtime = dict(agent.get("harness") or {}), dict(agent.get("runtime") or {})
    runtime = runtime or dict(harness.pop("runtime", {}))
    harness.pop("runtime", None)
    if harness and harness.get("id") != "null":
        seat["harness"] = harness
    if runtime and runtime != {"type": "subprocess"}:
        seat["runtime"] = runtime
    if agent.get("max_turns"):
        seat["max_turns"] = agent["max_turns"]
    for key in agent:
        if key not in ("harness", "runtime", "max_turns", "timeout"):
            given.drop(f"{where}.{key}", "who plays a seat is set in environments.N.seats.NAME")
    for key in sorted((agent.get("timeout") or {}).keys() - {"rollout"}):
        given.drop(f"{where}.timeout.{key}", "a rollout has one limit here: rollout.timeout_seconds")
    return seat
