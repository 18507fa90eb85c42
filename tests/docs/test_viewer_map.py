"""What is where in the viewer is written at the top of its packages; every file is named there."""

import re
from pathlib import Path

import pytest

import flows.viewer
import flows.viewer.data


@pytest.mark.parametrize("package", [flows.viewer, flows.viewer.data], ids=lambda package: package.__name__)
def test_every_file_of_the_viewer_has_its_place_in_the_list(package: object) -> None:
    said = package.__doc__ or ""
    folder = Path(str(package.__file__)).parent
    names = {path.stem for path in folder.glob("[a-z]*") if path.suffix in ("", ".py")}
    assert len(names) >= 10
    patterns = {name: {name, f"{name.partition('_')[0]}_*"} for name in names}
    words = set(re.findall(r"[a-z_]+\*?", said))
    assert sorted(name for name, known in patterns.items() if not known & words) == []
