"""What all ranks do together: `python -m torch.distributed.run ... -m tests.tasks.learner.ranks MODEL SEEING FILE`.

The same code makes the figures of one rank, in the test's own process, and those of two, in processes of their own.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch._dynamo.utils import counters

from configs.losses import DpoLoss, DppoLoss, GspoLoss
from configs.training import MuonOptimizer, SignSgdOptimizer, TrainingConfig
from tasks.learner.attention import ATTENTION, register_attention
from tasks.learner.checkpoint import moment_tensors
from tasks.learner.distributed import ALONE, end_rank, shard, start_world, whole
from tasks.learner.loop import accumulate_gradients
from tasks.learner.loss import Objective
from tasks.learner.model import PolicyModel, compile_policy, load_policy
from tasks.learner.optimizer import clip_gradients, new_optimizer
from tasks.learner.protocol import LearnerError
from tests.fixtures.packed import batch_of, batches_from_table, padding, sample
from tests.fixtures.pictures import seeing_batches
from tests.fixtures.policies import CPU, flat_gradient, random_steps
from tests.fixtures.varlen import varlen_on_cpu

SAMPLES = [
    sample("a", 23, 1),
    sample("b", 5, 2, "ce"),
    sample("c", 12, 3, temperature=0.7),
    sample("d", 7, 4, "ref_kl"),
    sample("e", 2, 5),
    sample("f", 3, 6, "ref_kl"),
    sample("g", 17, 7, "ce"),
]
"""Samples of one to twelve weighted tokens."""
APART = [([each], (0, number)) for number, each in enumerate(SAMPLES)]
"""Every sample in a row of its own, one micro-step after the other, on one rank."""
ALL_IN_ONE = [(SAMPLES[:5], (0, 0)), (SAMPLES[5:], (0, 1))]
"""Two rows, whose lengths are no multiple of a number of ranks."""
LOSSES = {"token": DppoLoss(), "sequence": GspoLoss(clip_low=0.3, clip_high=0.3), "pairs": DpoLoss(beta=0.3)}
"""Gradients that follow from a token alone, from all tokens of a sequence, and from those of two sequences."""
LABELS = {each.sample_id: (f"pair {number // 2}", 1.0 - number % 2 * 2) for number, each in enumerate(SAMPLES)}
"""Which samples are compared: of the last one there is no other."""
SPLITS = {
    "one row beside an idle rank": [(SAMPLES, (0, 0))],
    "all on the second rank": [(row, (1, step)) for row, (_, step) in APART],
    "one sample against six": [(SAMPLES[:1], (0, 0)), (SAMPLES[1:], (1, 0))],
    "a component on one rank alone": [
        ([SAMPLES[1], SAMPLES[6]], (0, 0)),
        ([SAMPLES[0], SAMPLES[4]], (1, 0)),
        ([SAMPLES[2]], (0, 1)),
        ([SAMPLES[5], SAMPLES[3]], (1, 1)),
    ],
    "more micro-steps on one rank": [
        ([SAMPLES[4]], (0, 0)),
        ([SAMPLES[6], SAMPLES[0]], (1, 0)),
        ([SAMPLES[5]], (0, 1)),
        (SAMPLES[1:4], (0, 2)),
    ],
    "dealt in turn": [([each], (number % 2, number // 2)) for number, each in enumerate(SAMPLES)],
}
OPTIMIZERS = {"muon": MuonOptimizer(), "sign_sgd": SignSgdOptimizer()}


def plain_policy(directory, dtype):
    """Return the model, not sharded."""
    from transformers import AutoModelForCausalLM

    register_attention()
    causal = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=ATTENTION)
    return PolicyModel(causal, chunk=8).train()


def policy_in(directory, dtype, compiled=False, world=ALONE):
    """Return the model, sharded over the ranks of this process's world, as `world` says."""
    policy = plain_policy(directory, dtype)
    if compiled:
        compile_policy(policy, CPU, one_graph=True)
    shard(policy, policy.causal.get_decoder().layers, CPU, half=False, replicas=world.replicas)
    policy.context = world.context
    return policy


def half_policy(directory, world=ALONE, **settings):
    """Return the model, whose weights are gathered in bfloat16."""
    return load_policy(directory, TrainingConfig(device="cpu", dtype="bfloat16", **settings), CPU, world=world)


def gradient(policy, rows, world, loss="token"):
    """Return the whole gradient of the rows, flat, its norm before clipping, and what was measured.

    Where `rows` say (rank, micro_step) of others, padding stands.
    """
    policy.zero_grad()
    batch, statistics = batch_of(dealt(rows, world.size // world.ranks_per_row)), []
    totals = accumulate_gradients(
        policy, batch, Objective(LOSSES[loss]), world, CPU, take=statistics.extend, labels=LABELS
    )
    measured = {name: torch.tensor(value, dtype=torch.float64) for name, value in totals.sums.items()}
    for entry in statistics:
        for name, start, end in zip(entry.row.sample_ids, entry.row.borders, entry.row.borders[1:], strict=False):
            measured[f"statistics of {name}"] = torch.from_numpy(
                np.stack([entry.logprobs, entry.entropies])[:, start:end]
            )
    measured["gradient"] = flat_gradient(policy)
    measured["norm"] = torch.tensor(clip_gradients(policy, float("inf"), world), dtype=torch.float64)
    return measured


def dealt(rows, num_ranks):
    """Return rows in the order in which they are dealt to the ranks and micro-steps that they name."""
    places = {place: samples for samples, place in rows}
    last = max(step for _, step in places)
    return [places.get((rank, step), [padding(2)]) for step in range(last + 1) for rank in range(num_ranks)]


def three_steps(directory, name):
    """Return weights and optimizer state after three steps on gradients that all ranks know."""
    policy = policy_in(directory, torch.float32)
    optimizer = new_optimizer(policy, TrainingConfig(weight_decay=0.1, optimizer=OPTIMIZERS[name]))
    random_steps(policy, optimizer, 3)
    tensors = {**dict(policy.causal.named_parameters()), **moment_tensors(policy, optimizer)}
    return {key: whole(value.detach()) for key, value in tensors.items()}


def seen(directory, world):
    """Return gradient and losses of rows of which some show pictures, of a model whose tower is trained."""
    policy = load_policy(directory, TrainingConfig(device="cpu", dtype="float32", vision="trained"), CPU, world=world)
    (batch,) = batches_from_table(*seeing_batches())
    totals = accumulate_gradients(policy, batch, Objective(LOSSES["token"]), world, CPU)
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in totals.sums.items()}
    tower = [whole(p.grad).flatten() for name, p in policy.named_parameters() if ".visual." in name]
    return found | {"tower": torch.cat(tower), "gradient": flat_gradient(policy)}


def shared_rows(directory, world):
    """Return the figures of ranks that share rows, of one copy of the weights and of two, for each loss."""
    found = {}
    for replicas, context in sorted({(1, 2), (2, 1), (world.size, 1), (2, 2), (1, world.size)}):
        arranged = world.arrange(replicas, context)
        policy = policy_in(directory, torch.float64, world=arranged)
        for loss in LOSSES:
            found[f"{replicas} x {context} {loss}"] = gradient(policy, ALL_IN_ONE, arranged, loss)
    return found


def as_written(directory, seeing, world):
    """Return the figures of every split, every optimizer, and of rows that are shared or show pictures."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        policy = policy_in(directory, dtype)
        found |= {f"{name} {dtype}": gradient(policy, rows, world) for name, rows in SPLITS.items()}
        found[f"pairs {dtype}"] = gradient(policy, SPLITS["a component on one rank alone"], world, "pairs")
    found |= {name: three_steps(directory, name) for name in OPTIMIZERS}
    found["in 8 bits"] = gradient(half_policy(directory, world, fp8=True), SPLITS["dealt in turn"], world)
    return found | shared_rows(directory, world) | {"seen": seen(seeing, world), "refused": refused(directory, world)}


def refused(directory, world):
    """Return what rank 0 says of a model that lies on its machine alone."""
    try:
        load_policy(directory / "nowhere" if world.rank else directory, TrainingConfig(device="cpu"), CPU, world=world)
    except LearnerError as error:
        return str(error)


def compiled(directory, world):
    """Return the figures of every split with compiled layers, how many graphs they took, and those of shared rows."""
    with varlen_on_cpu():
        policy = policy_in(directory, torch.float32, compiled=True)
        found = {f"{name} compiled": gradient(policy, rows, world) for name, rows in SPLITS.items()}
        found["graphs"] = counters["stats"]["unique_graphs"]
        arranged = world.arrange(1, 2)
        policy = policy_in(directory, torch.float32, compiled=True, world=arranged)
        return found | {"shared and compiled": gradient(policy, ALL_IN_ONE, arranged)}


def main(directory, seeing, out, what):
    """Write the figures of layers as they are written, or of `compiled` ones."""
    world = start_world()
    found = compiled(directory, world) if what == "compiled" else as_written(directory, seeing, world)
    if world.rank == 0:
        torch.save(found, out)
    end_rank()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4])
