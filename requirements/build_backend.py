"""The build backend: setuptools, whose wheel holds one package, `stagecoach`.

In a checkout the packages are `configs`, `storage`, `tasks` and `flows`, and an editable installation imports them by
these names. A person may well have a `tasks.py` or `flows/`, so that the wheel has ours below `stagecoach`:
`stagecoach.py` becomes `stagecoach/__init__.py`, and imports, and strings in code, presets and deployments, that name
our modules name them there.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
]
PACKAGES = "configs|storage|tasks|flows"
IMPORT = re.compile(rf"^( *(?:from|import) )(?=(?:{PACKAGES})\b)", re.MULTILINE)
MODULE = re.compile(rf"(\bentrypoint: |[\"'])(?=((?:{PACKAGES})(?:\.\w+)+)(?::\w+)?(?:[\"']|$))", re.MULTILINE)
"""A string, or Prefect's entry point in YAML, that may be the name of a module or of something in one."""
SOURCES = (*PACKAGES.split("|"), "examples", "requirements", "stagecoach.py", "pyproject.toml", "README.md", "LICENSE")
COMPILED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,  # of metadata made before, which this backend makes none of
) -> str:
    """Build the wheel of the checkout that is the current directory; return the name of its file."""
    checkout = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        relocate(checkout, Path(directory, "relocated"))
        os.chdir(Path(directory, "relocated"))
        try:
            return str(build_meta.build_wheel(str(checkout / wheel_directory), config_settings))
        finally:
            os.chdir(checkout)


def relocate(checkout: Path, target: Path) -> None:
    """Copy a checkout to a new directory, with our packages below `stagecoach` there."""
    package = target / "stagecoach"
    package.mkdir(parents=True)
    for source in (checkout / name for name in SOURCES):
        if source.is_dir():
            shutil.copytree(source, target / source.name, ignore=COMPILED)
        else:
            shutil.copy(source, target)
    for name in PACKAGES.split("|"):
        (target / name).rename(package / name)
    (target / "stagecoach.py").rename(package / "__init__.py")
    (package / "py.typed").touch()
    for path in (path for path in package.rglob("*") if path.suffix in (".py", ".yaml", ".toml")):
        path.write_text(relocated(path.read_text("utf-8"), checkout), "utf-8")
    project = (target / "pyproject.toml").read_text("utf-8").replace('py-modules = ["stagecoach"]', "py-modules = []")
    (target / "pyproject.toml").write_text(re.sub(rf'"(?=(?:{PACKAGES})[.:*\w]*")', '"stagecoach.', project), "utf-8")


def relocated(text: str, checkout: Path) -> str:
    """Return a file's text with our modules named as the wheel has them."""

    def prefixed(match: re.Match[str]) -> str:
        path = checkout / match[2].replace(".", "/")
        return f"{match[1]}stagecoach." if path.is_dir() or path.with_suffix(".py").is_file() else match[1]

    return MODULE.sub(prefixed, IMPORT.sub(r"\1stagecoach.", text))
