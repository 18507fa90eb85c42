"""Files below a root by age and size, and their deletion: what all housekeeping shares."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pyarrow.fs as pafs

from storage.errors import border
from storage.roots import Root


def older(
    root: Root, below: str, hours: float, ending: str = "", kind: pafs.FileType = pafs.FileType.File, deep: bool = True
) -> list[str]:
    """The paths of one kind below a directory that were last changed longer ago than so many hours, sorted."""
    oldest = datetime.now(UTC) - timedelta(hours=hours)
    found = _listed(root, below, deep)
    wanted = [info for info in found if info.type == kind and info.path.endswith(ending)]
    return sorted(info.path for info in wanted if info.mtime is not None and info.mtime <= oldest)


def sizes(root: Root, below: str) -> dict[str, int]:
    """The size in bytes of every file below a directory, by path; none where there is no directory."""
    return {info.path: info.size or 0 for info in _listed(root, below) if info.type == pafs.FileType.File}


def delete(root: Root, path: str) -> int:
    """Delete a file that is no longer needed, if it is still there; return its size in bytes."""
    with border("deleting a file that is no longer needed", root.child(path)), suppress(FileNotFoundError):
        size = root.files.get_file_info(path).size or 0
        root.delete(path)
        return size
    return 0


def _listed(root: Root, below: str, deep: bool = True) -> list[pafs.FileInfo]:
    with border("listing files", root.child(below)):
        return list(root.files.get_file_info(pafs.FileSelector(below, allow_not_found=True, recursive=deep)))
