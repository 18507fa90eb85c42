"""What the section of adapters refuses, and that its absence leaves no trace in keys."""

import pytest
from pydantic import ValidationError

from configs.checks.training import lora_problems
from configs.run import content
from configs.training import LoraConfig, TrainingConfig


def test_what_works_has_no_problems() -> None:
    for lora in (None, LoraConfig(), LoraConfig(rank=512, target_modules=("q_proj", "v_proj"))):
        assert list(lora_problems(lora)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "0.1 would train another policy than is published"),
        ({"rank": 513}, "adapters up to rank 512, not 513"),
        ({"target_modules": ()}, "name at least one module"),
        ({"target_modules": ("q_proj", "lm_head")}, "lm_head cannot have an adapter"),
        ({"target_modules": ("embed_tokens",)}, "embed_tokens cannot have an adapter"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], message: str) -> None:
    (problem,) = lora_problems(LoraConfig(**settings))
    assert problem.startswith(f"training.lora.{next(iter(settings))}: ")
    assert message in problem


@pytest.mark.parametrize("settings", [{"rank": 0}, {"alpha": 0}, {"target_modules": "every-linear"}])
def test_what_makes_no_sense_is_no_section(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig(**settings)


def test_adapters_are_in_keys() -> None:
    assert content(TrainingConfig())["lora"] is None
    one, other = (content(TrainingConfig(lora=LoraConfig(rank=rank))) for rank in (4, 8))
    assert one["lora"]["rank"] == 4
    assert one != other
