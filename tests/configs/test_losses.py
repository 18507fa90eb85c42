"""Losses in a config: chosen by type, with their own settings, and refused where they cannot work."""

import pytest

from configs.errors import ConfigError
from configs.load import load
from configs.losses import PpoLoss

DEMO = ["seed=7", "model.path=/x"]


def loss(*overrides):
    return load(["demo"], [*DEMO, *overrides]).training.loss


def test_a_loss_takes_nothing_over_from_the_one_before():
    assert loss("training.loss.mask_high=0.5", "training.loss.type=ppo") == PpoLoss()
    with pytest.raises(ConfigError, match="mask_high"):
        loss("training.loss.type=ppo", "training.loss.mask_high=0.5")


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(ConfigError, match="'dppo', 'ipo', 'ppo', 'cispo', 'gspo', 'dpo', 'kto', 'custom'"):
        loss("training.loss.type=grpo")
