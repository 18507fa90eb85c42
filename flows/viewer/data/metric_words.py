"""What a number of a step is: its unit, and what it is of, in a few words."""

from typing import NamedTuple

from tasks.metrics.figures import MEANINGS


class About(NamedTuple):
    """What is said of a number."""

    unit: str
    """`share` is from 0 to 1; empty where it has none: a loss, a reward."""
    told: str


STEPS_OF = {"update": "of the step's last optimizer step", "updates": "over all optimizer steps of the step"}
ABOUT = {
    "reward": About("", "over rollouts that were scored"),
    "reward/std": About("", "standard deviation over rollouts that were scored"),
    "metrics": About("", "mean over rollouts, measured by the environment"),
    "rollouts": About("rollouts", "of the step, without those that were stopped"),
    "num_turns": About("turns", "mean of a rollout"),
    "num_input_tokens": About("tokens", "mean of a rollout: what the policy read"),
    "num_output_tokens": About("tokens", "mean of a rollout: what the policy sampled"),
    "longest_output": About("tokens", "most that one rollout sampled"),
    "is_truncated": About("share", "of rollouts that were cut off"),
    "staleness": About("steps", "mean since the policy that sampled"),
    "samples_per_rollout": About("samples", "mean of a rollout, one for each branch"),
    "kept": About("share", "of verdicts that keep"),
    "errored_rollout": About("share", "of rollouts with an error, or one of a class"),
    "stragglers": About("share", "of rollouts that were stopped as enough others had ended"),
    "filters": About("share", "of rollouts that the filter found, enforced or not"),
    "filters/is_filtered": About("share", "of rollouts that any filter left out"),
    "trainable/count": About("rollouts", "left to train on"),
    "trainable/ratio": About("share", "of rollouts left to train on"),
    "accounting": About("rollouts", "by what became of them"),
    "timing": About("s", "mean wall-clock of a rollout"),
    "timing/stage": About("s", "wall-clock of the stage"),
    "tokens": About("tokens", "that the stage handled"),
    "tokens_per_second": About("tokens/s", "of the stage, over its wall-clock"),
    "updates": About("updates", "optimizer steps on the batch"),
    "rollout/input_tokens": About("tokens", "read by all rollouts, those that were stopped too"),
    "rollout/output_tokens": About("tokens", "sampled by all rollouts, those that were stopped too"),
    "rollout/retokenised_turns": About("turns", "that went back to the policy as other tokens than it sampled"),
    "reasons": About("rollouts", "that were left out for that reason"),
    "groups": About("groups", "of the step, where they are replaced or refused"),
    "groups/batches": About("batches", "that the groups were drawn in"),
    "entropy": About("nats", "mean over rl tokens, over all optimizer steps"),
    "mismatch_kl": About("nats", "over rl tokens of r - 1 - log r, engine against learner"),
    "mismatch_kl_masked": About("nats", "the mismatch of tokens outside the trust region"),
    "mismatch_kl_unmasked": About("nats", "the mismatch of tokens within the trust region"),
    "masked_fraction": About("share", "of rl tokens outside the trust region"),
    "ratio": About("", "quantile of the importance ratio over rl tokens"),
    "rl_tokens": About("tokens", "with that component's weight"),
    "ce_tokens": About("tokens", "with that component's weight"),
    "ref_kl_tokens": About("tokens", "with that component's weight"),
    "ce_nll": About("nats", "negative log-likelihood of ce tokens"),
    "ref_kl": About("nats", "policy against reference, over ref_kl tokens"),
    **{f"batch/{name}": About("", meaning) for name, meaning in MEANINGS.items()},
}
"""By the beginning of a name, the longest that is known."""
OF_UPDATES = {
    "entropy": About("nats", "mean over rl tokens"),
    "mismatch_kl": About("nats", "mean over rl tokens of r - 1 - log r, engine against learner"),
    "mismatch_kl_max": About("nats", "most of an rl token of r - 1 - log r, engine against learner"),
    "mismatch_kl_std": About("nats", "standard deviation over rl tokens of r - 1 - log r, engine against learner"),
    "masked_mismatch_kl": About("nats", "the mismatch of tokens outside the trust region"),
    "unmasked_mismatch_kl": About("nats", "the mismatch of tokens within the trust region"),
    "masked_fraction": About("share", "of rl tokens outside the trust region"),
    "masked_fraction_positive": About("share", "of rl tokens with a positive advantage outside the trust region"),
    "masked_fraction_negative": About("share", "of rl tokens with a negative advantage outside the trust region"),
    "truncated_fraction": About("share", "of rl tokens whose importance weight was cut"),
    "ratio_q": About("", "quantile of the importance ratio over rl tokens"),
    "grad_norm": About("", "norm of the gradient before clipping"),
    "clipped": About("", "1 where the gradient was clipped"),
    "ce_nll": About("nats", "negative log-likelihood of ce tokens"),
    "ref_kl": About("nats", "policy against reference, over ref_kl tokens"),
    "ref_kl_loss": About("", "a component of the loss"),
    "ref_kl_tokens": About("tokens", "with that component's weight"),
    "ref_kl_masked_fraction": About("share", "of ref_kl tokens outside the trust region"),
    "rl_tokens": About("tokens", "with that component's weight"),
    "ce_tokens": About("tokens", "with that component's weight"),
    "rl_loss": About("", "a component of the loss"),
    "ce_loss": About("", "a component of the loss"),
    "loss": About("", "the sum of its components"),
    "learning_rate": About("", "by its schedule"),
    "num_rows": About("rows", "packed rows"),
    "num_tokens": About("tokens", "in packed rows"),
    "weighted_tokens": About("tokens", "that had a weight"),
    "has_optimizer": About("", "1 where the optimizer's state was saved"),
    "version": About("", "the policy that was made"),
    "update": About("", "its number on the batch, from 0"),
    "threads": About("threads", "of each learner process"),
    "processes": About("processes", "of the learner"),
}
"""By the beginning of what stands after `update/` and `updates/`."""


def about(measure: str) -> About:
    """Return what a number is by the name of its measure, without its scope; of one that is not known nothing."""
    head, _, rest = measure.partition("/")
    if rest and head in STEPS_OF:
        found = _longest(rest, OF_UPDATES)
        return About(found.unit, ", ".join(filter(None, (found.told, STEPS_OF[head]))))
    return _longest(measure, ABOUT)


def _longest(name: str, known: dict[str, About]) -> About:
    found = [begin for begin in known if name.startswith(begin)]
    return known[max(found, key=len)] if found else About("", "")
