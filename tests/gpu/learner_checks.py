"""Checks the learner on this machine's device: `python -m tests.gpu.learner_checks REQUEST`, a line of JSON each.

REQUEST is JSON: `model` (a directory), `scratch`, `training`, `learner`
and `tokens` of a row. With `num_rows` the one line is the norm of the gradient of so many rows, by all ranks that there
are. What is right on one machine is known on the next one only after it was looked at there.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from configs.training import TrainingConfig
from flows.services.memory import learner_memory, model_shape
from tasks.learner.attention import BEST_OF, has_kernel, largest_difference
from tasks.learner.checkpoint import companions, memory_sha256, save_rounded
from tasks.learner.distributed import end_rank, start_world
from tasks.learner.kept_state import StateKeeper, load_kept
from tasks.learner.loop import train_row
from tasks.learner.loss import Objective
from tasks.learner.model import compiles, load_policy, run_row
from tasks.learner.optimizer import apply_gradients, clip_gradients, new_optimizer
from tasks.learner.rows import STREAMS, Row
from tasks.learner.speed import StepTimer, training_cost
from tasks.learner.trainer import Trainer

SEGMENTS = 8
STEPS = 4
"""Timed steps, of which the first compiles."""
BOUNDS = {"attention": 0.03, "apart": 0.02, "compiled": 0.02, "plan": 1.1}
"""Largest differences: of attention by value, of log-probs in nats, of a gradient's norm and of memory by share."""
HALF = {"dtype": "bfloat16", "policy_dtype": "bfloat16"}


def checks(request):
    """Yield what was measured: `name`, `measured`, `expected`, and `passed`, null where a figure is only noted."""
    model, world = Path(request["model"]), start_world()
    settings, device, attention = _ready(request, world)
    row = _row(request["tokens"], SEGMENTS)
    yield _attention(attention, device)
    if has_kernel(device, torch.bfloat16):
        name = f"attention {attention} beside segments in float32"
        yield _at_most(name, largest_difference(device, torch.bfloat16), BOUNDS["attention"])
    # Before anything else is trained: what the allocator holds is then of such steps alone.
    yield from _speed(model, settings, row, device, world)
    yield from _apart(model, settings, row, device)
    first, second = (_one_step(model, settings, row, device, world) for _ in range(2))
    if settings.deterministic:
        yield _same("the same weights twice", first[1], second[1])
    if compiles(settings, device):
        eager = _one_step(model, settings.model_copy(update={"compile": False}), row, device, world)
        yield _at_most("compiled beside eager, norm", abs(first[0] / eager[0] - 1), BOUNDS["compiled"])
    yield _read_back(model, Path(request["scratch"]), settings, device, world)
    yield _kept(model, Path(request["scratch"]), settings, device, world)


def _ready(request, world):
    """Make the device ready; return the settings, the device and the attention that it has."""
    settings, trainer = TrainingConfig(**request["training"] | HALF), Trainer(world)
    trainer.configure(settings.model_dump(mode="json"), request["learner"])
    state = trainer.state()
    return settings, torch.device(state["device"]), state["attention"]


def gradient_norm(request, world):
    """Return the norm of the gradient of `num_rows` rows, of which each rank trains as many."""
    settings, device, _ = _ready(request, world)
    rows = [_row(request["tokens"], SEGMENTS, seed) for seed in range(request["num_rows"])]
    denominators = {"rl": sum(len(row.weighted) for row in rows), "ce": 0, "ref_kl": 0}
    policy = load_policy(Path(request["model"]), settings, device)
    for row in rows[world.rank :: world.size]:
        train_row(policy, row, denominators, Objective(settings.loss, settings.ref_kl), world, device)
    return clip_gradients(policy, settings.max_grad_norm, world)


def _row(tokens, segments, seed=0):
    """Return a row of equal segments in which every token but the first of each has weight."""
    borders = np.linspace(0, tokens, segments + 1).astype(int)
    streams = {name: np.zeros(tokens, np.float32) for name in STREAMS} | {"temperatures": np.ones(tokens, np.float32)}
    streams["rl_weights"][:] = streams["advantages"][:] = 1
    streams["rl_weights"][borders[:-1]] = 0
    ids = np.random.default_rng(seed).integers(0, 256, tokens)
    return Row(0, tuple(map(str, range(segments))), tuple(borders.tolist()), ids, streams)


def _attention(name, device):
    """Say which version of FlashAttention torch calls; one that is slower than the device's best is no success."""
    best = (name,)
    if device.type == "cuda":
        best = BEST_OF.get(torch.cuda.get_device_capability(device)[0], best)
    if name in best:
        return _check("torch's attention", name, "the fastest for this device", True)
    return _check("torch's attention", name, f"slower than expected: {' and '.join(best)} do not work here")


@torch.no_grad()
def _apart(model, settings, row, device):
    """Compare log-probs of a row's last segment with those beside other samples, and with those of a row of its own.

    Rows of one length are computed by the same kernels, so any difference would be a leak. Those of another length sum
    in another order: through the layers of a real model a token may be 0.1 nats off, but not all of them.
    """
    policy, start = load_policy(model, settings, device), row.borders[-2]
    size = len(row.token_ids) - start
    others = replace(row, token_ids=np.concatenate([row.token_ids[:start][::-1], row.token_ids[start:]]))
    streams = {name: stream[start:] for name, stream in row.streams.items()}
    alone = Row(0, row.sample_ids[-1:], (0, size), row.token_ids[start:], streams)
    packed, beside, single = (run_row(policy, each, device)[0][1 - size :].float() for each in (row, others, alone))
    yield _at_most("a sample beside others, nats", float((packed - beside).abs().max()), BOUNDS["apart"])
    yield _at_most("a sample alone, mean nats", float((packed - single).abs().mean()), BOUNDS["apart"])


def _one_step(model, settings, row, device, world):
    """Return the gradient's norm of a row, and the digest of the weights after a step."""
    policy = load_policy(model, settings, device)
    norm = _train(policy, new_optimizer(policy, settings), settings, row, device, world)
    return norm, memory_sha256(policy, world, rounded=True)


def _train(policy, optimizer, settings, row, device, world):
    denominators = {"rl": len(row.weighted), "ce": 0, "ref_kl": 0}
    train_row(policy, row, denominators, Objective(settings.loss, settings.ref_kl), world, device)
    norm = clip_gradients(policy, settings.max_grad_norm, world)
    apply_gradients(optimizer, 1e-3)
    return norm


def _read_back(model, scratch, settings, device, world):
    """Compare a policy that was written with what is loaded of it."""
    policy = load_policy(model, settings, device)
    digest, _ = save_rounded(policy, None, companions(model, "bfloat16"), scratch / "written", world)
    read = load_policy(scratch / "written", settings, device)
    return _same("a policy written and read", digest, memory_sha256(read, world, True))


def _kept(model, scratch, settings, device, world):
    """Compare weights with those of a state that is kept while they change."""
    policy, written = load_policy(model, settings, device), scratch / "kept"
    optimizer, keeper = new_optimizer(policy, settings), StateKeeper(world)
    for number in range(2):
        if number:
            digest, _ = save_rounded(policy, None, companions(model, "bfloat16"), written, world)
            keeper.keep("kept", policy, optimizer, scratch)
            keeper.settle()
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        apply_gradients(optimizer, 1e-2)
    keeper.wait()
    read = load_policy(written, settings, device)
    load_kept(
        "kept", read, new_optimizer(read, settings), scratch, world
    )  # refused where they are not the written ones
    return _same("state kept while weights change", digest, memory_sha256(read, world, True))


def _speed(model, settings, row, device, world):
    """Time steps of a row; the first one compiles, the last one counts."""
    policy = load_policy(model, settings, device)
    optimizer, cost, found, seconds = new_optimizer(policy, settings), training_cost(policy), {}, []
    for step in range(STEPS):
        if step < 2:  # what checks and compiling held of the device is none of a step's
            _give_back(device)
        timer = StepTimer(device)
        _train(policy, optimizer, settings, row, device, world)
        timer.end("gradients")
        found = timer.figures([row], cost, 1)
        seconds.append(found["seconds_gradients"])
    yield _check("first step more than the last: compiling", f"{seconds[0] - seconds[-1]:.1f} s")
    yield _check("tokens a second", f"{found['tokens_per_second']:.0f}")
    if found["mfu"] is not None:
        yield _check("MFU", f"{found['mfu']:.1%}", "docs/gpu.md has predictions for 0.6B and 4B")
    shape, reserved = model_shape(str(model)), found["peak_reserved_gib"]
    if shape and reserved is not None:
        sizes = {"tokens": len(row.token_ids), "ranks": 1}
        kind, compiled = settings.gradient_checkpointing, compiles(settings, device)
        recompute = False if kind == "auto" else kind
        plan = learner_memory(shape, settings, **sizes, recompute=recompute, compiled=compiled).total / 2**30
        limit = f"at most {BOUNDS['plan']:g} x the plan's {plan:.2f} GiB"
        yield _check("memory of the learner", f"{reserved:.2f} GiB", limit, reserved <= BOUNDS["plan"] * plan)


def _give_back(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _at_most(name, found, most):
    return _check(name, f"{found:.3g}", f"at most {most:g}", found <= most)


def _same(name, found, expected):
    return _check(name, found[:12], expected[:12], found == expected)


def _check(name, measured, expected="noted", passed=None):
    return {"name": name, "measured": measured, "expected": expected, "passed": passed}


def main():
    """Print a line for each check as it is made."""
    request = json.loads(sys.argv[1])
    if "num_rows" in request:
        norm = gradient_norm(request, world := start_world())
        if world.rank == 0:
            print(json.dumps(norm))
    else:
        for check in checks(request):
            print(json.dumps(check), flush=True)
    end_rank()


if __name__ == "__main__":
    main()
