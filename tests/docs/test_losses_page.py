"""The page on losses: its own loss trains by its settings, its test passes, and it names every type."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from configs.losses import CustomLoss, LossConfig

pytestmark = pytest.mark.engine

PAGE = (Path(__file__).parents[2] / "docs/losses.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_loss_of_the_page_passes_its_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, test = blocks("python")
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (settings,) = blocks("toml")
    loss = CustomLoss(**tomllib.loads(settings)["training"]["loss"])
    scope: dict[str, object] = {"LOSS": loss}
    exec(compile(test, "docs/losses.md", "exec"), scope)
    (name,) = [name for name in scope if name.startswith("test_")]
    scope[name]()  # type: ignore[operator]
    scope["LOSS"] = loss.model_copy(update={"arguments": {"temperature": 0.01}})
    with pytest.raises(AssertionError):
        scope[name]()  # type: ignore[operator]


def test_the_page_names_every_loss() -> None:
    kinds = {get_args(each.model_fields["type"].annotation)[0] for each in get_args(get_args(LossConfig)[0])}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == kinds
    assert len(PAGE.split("## One of your own")[1].splitlines()) < 60
