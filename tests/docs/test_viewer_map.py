"""What is where in the viewer and in the queries is written at the top of the packages; every file is named there."""

import re
from pathlib import Path
from types import ModuleType

import pytest

import flows.queries
import flows.viewer


@pytest.mark.parametrize("package", [flows.viewer, flows.queries], ids=lambda package: package.__name__)
def test_every_file_has_its_place_in_the_list(package: ModuleType) -> None:
    folder = Path(str(package.__file__)).parent
    names = {path.stem for path in folder.glob("[a-z]*") if path.suffix in ("", ".py")}
    assert len(names) >= 10
    words = set(re.findall(r"[a-z_]+", package.__doc__ or ""))
    assert sorted(names - words) == []
