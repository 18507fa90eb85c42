"""What each preset that `stagecoach demo` can show starts from: a small model, and demonstrations to warm it up on.

The environment's package says the rest: `python -m PACKAGE.demonstrations FILE --words FILE` writes the demonstrations,
and the texts that the model's tokenizer shall keep whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SEED = 17
# Heads of 32: the engine has no CPU kernel for smaller ones.
MODEL = "--hidden 96 --layers 3 --heads 3 --kv-heads 3"
# So that a conversation of several turns is one training sample: the renderer then keeps what it put into a turn.
NO_THOUGHTS = "model.renderer_settings={enable_thinking=false}"
# Conversations of several turns are long: as many tokens as the one-line demonstrations of `demo`, in fewer rows.
SHORT = ("steps=6", "assignment.groups_per_step=800", "training.decay_steps=300", "training.learning_rate=3e-3")


@dataclass(frozen=True)
class Recipe:
    """How the model that a preset trains comes about, and what to say when it is trained."""

    about: str
    """What the run was about: the beginning of the summary's first sentence."""
    demonstrations: tuple[str, ...]
    """For each environment its package and, after spaces, arguments for the package's `demonstrations`."""
    warm_up: tuple[str, ...] = ()
    """Overrides of the warm-up, which is the preset `sft_demo`."""
    model: str = MODEL
    """Arguments for `tasks.learner.tiny`."""
    try_next: str = "algorithm.normalise_std=true"
    """A setting that `stagecoach show` may be asked about."""


RECIPES: Mapping[str, Recipe] = {
    # Most demonstrations are wrong, so that the warmed-up model knows all the forms and not yet which one pays.
    "demo": Recipe(
        "The model was trained to reverse text inside tags",
        ("reverse_text --count 38400 --right 0.14 --untagged 0.70 --max-length 5 --seed 1",),
    ),
    "two_environments": Recipe(
        "The model was trained to reverse text inside tags and to look things up with a tool",
        ("lookup", "reverse_text --count 4096 --max-length 5"),
        (NO_THOUGHTS,),
    ),
    "calc_tools": Recipe(
        "The model was trained to work out a chain of operations with a calculator",
        ("calc_tools --count 4800",),
        (NO_THOUGHTS, *SHORT),
    ),
    "wikispeedia": Recipe(
        "The model was trained to find its way from topic to topic",
        ("wikispeedia --count 4800 --num-topics 16",),
        (NO_THOUGHTS, *SHORT),
    ),
    "alphabet_sort": Recipe(
        "The model was trained to keep a list of names sorted over several turns",
        ("alphabet_sort --count 4800 --min-words 1 --max-words 2 --num-names 26",),
        (NO_THOUGHTS, *SHORT),
    ),
    "kuhn_poker": Recipe(
        "The model played both seats of a small poker game, whose chips add up to zero",
        ("kuhn_poker --count 4800",),
        (NO_THOUGHTS, *SHORT),
        try_next="algorithm.decay=0.95",
    ),
    "proposer_solver": Recipe(
        "The model was trained to set sums and to solve them",
        ("proposer_solver --count 4800",),
        (NO_THOUGHTS, *SHORT),
        try_next="training.learning_rate=1e-4",
    ),
    "debate": Recipe(
        "Two debaters were trained to convince a judge; what one wins the other loses",
        ("debate",),
        (NO_THOUGHTS, *SHORT),
        try_next="algorithm.decay=0.8",
    ),
}
"""By the name of the preset."""
