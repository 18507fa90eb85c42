"""The root of a store: a directory or a prefix in an object store, and durable reads and writes below it."""

import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.fs as pafs

from storage.errors import LayoutError, StoreError, border
from storage.keys import sha256
from storage.refs import File
from storage.s3 import Bucket, file_system, locate, settings


@dataclass(frozen=True)
class Root:
    """One place that holds a store; all paths given to it are relative and use forward slashes.

    `directory` is the local directory, or None in an object store, whose place is then `bucket`. `address` and
    `options` are for what reads tables (Polars).
    """

    address: str
    files: pafs.SubTreeFileSystem
    directory: Path | None
    options: Mapping[str, str] = field(repr=False)  # the secret key is among them
    bucket: Bucket | None = None
    read_only: bool = False
    """Whether nothing is written: tables that are not there are empty, torn logs stay, the server is not probed."""

    def child(self, path: str) -> str:
        """The address of something below the root. Raises StoreError for a path that leads out of it, by a link too."""
        check_inside(path, self.address)
        if self.directory is not None:
            check_links(self.directory, path)
        return f"{self.address}/{path}"

    def exists(self, path: str) -> bool:
        """Say whether a file or directory is there."""
        with border("looking for a file", self.child(path)):
            return bool(self.files.get_file_info(path).type != pafs.FileType.NotFound)

    def names(self, path: str) -> list[str]:
        """The sorted names right below a directory; none where there is no directory."""
        self.child(path)
        found = self.files.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def read(self, path: str) -> bytes:
        """All bytes of a file; FileNotFoundError passes through."""
        place = self.child(path)
        if self.bucket is not None:
            return self.bucket.get(path)
        with open(place, "rb") as stream:
            return stream.read()

    def write(self, path: str, data: bytes) -> File:
        """Write a new file so that it survives loss of power, and return its reference.

        The bytes hashed are those in memory, so that damage on the way to the disk shows when they are read.
        Raises NoSpace or StoreUnavailable; what was half written is then removed where possible.
        """
        with self._writing(path, data):
            if self.directory is None:
                self._put(path, data)
            else:
                make_directory((self.directory / path).parent)
                _write_file(self.directory / path, data)
                synchronise((self.directory / path).parent)
        return File(path, len(data), sha256(data))

    def create(self, path: str, data: bytes) -> bool:
        """Write a file where there is none, whole or not at all; False where another was first.

        In an object store False may also mean that an earlier attempt of ours succeeded and its answer was lost.
        Raises NoSpace or StoreUnavailable.
        """
        with self._writing(path, data):
            if self.bucket is not None:
                return self.bucket.put_new(path, data)
            assert self.directory is not None
            return _create_durably(self.directory / path, data)

    def replace(self, path: str, data: bytes, durable: bool = True) -> None:
        """Write a file in the place of what is there, whole or not at all. Raises NoSpace or StoreUnavailable.

        What is not `durable` may be the old file, or empty, after a loss of power.
        """
        with self._writing(path, data):
            if self.directory is None:
                self._put(path, data)
            else:
                draft = _write_draft(self.directory / path, data, durable)
                draft.replace(self.directory / path)
                if durable:
                    synchronise(draft.parent)

    def _writing(self, path: str, data: bytes) -> AbstractContextManager[None]:
        assert not self.read_only, f"{path} was to be written, in a store that is only read"
        return border(f"writing {len(data)} bytes", self.child(path))

    def _put(self, path: str, data: bytes) -> None:
        with self.writer(path) as stream:
            stream.write(data)

    def delete(self, path: str) -> None:
        """Remove a file; FileNotFoundError passes through where the file system says so, an object store does not."""
        assert not self.read_only, f"{path} was to be removed, in a store that is only read"
        self.child(path)
        if self.bucket is None:
            self.files.delete_file(path)
        else:
            self.bucket.delete(path)

    def remove_unneeded(self, path: str) -> None:
        """Delete a file that is no longer needed, if it is still there."""
        with border("deleting a file that is no longer needed", self.child(path)), suppress(FileNotFoundError):
            self.delete(path)

    def remove_directory(self, path: str) -> None:
        """Delete a directory of a local root with all in it, if it is still there; of a link the link alone."""
        assert self.directory is not None and not self.read_only, f"{path} was to be removed"
        place = Path(self.child(path))
        with border("deleting a directory that is no longer needed", str(place)), suppress(FileNotFoundError):
            if place.is_symlink():
                place.unlink()
            else:
                shutil.rmtree(place)

    def file_sizes(self, below: str) -> dict[str, int]:
        """The size in bytes of every file below a directory, by path; none where there is no directory."""
        return {info.path: info.size or 0 for info in self._list(below)}

    def paths_older(self, below: str, hours: float, ending: str = "") -> list[str]:
        """The files below a directory that were last changed longer ago than `hours`, the oldest first."""
        oldest = datetime.now(UTC) - timedelta(hours=hours)
        infos = [info for info in self._list(below) if info.path.endswith(ending)]
        old = [(info.mtime_ns or 0, info.path) for info in infos if info.mtime is not None and info.mtime <= oldest]
        return [path for _, path in sorted(old)]

    def _list(self, below: str) -> list[pafs.FileInfo]:
        with border("listing files", self.child(below)):
            infos = self.files.get_file_info(pafs.FileSelector(below, allow_not_found=True, recursive=True))
        return [info for info in infos if info.type == pafs.FileType.File]

    def writer(self, path: str) -> pa.NativeFile:
        """A stream into a new object of an object store; the object is there when it is closed."""
        self.child(path)
        return self.files.open_output_stream(path, compression=None)

    def make_durable(self, path: str) -> None:
        """Force a file, if it is there, and its directory to the disk; nothing to do when not local."""
        if self.directory is None:
            return
        for place in (self.directory / path, (self.directory / path).parent):
            if place.exists():
                synchronise(place)


def check_inside(path: str, where: str) -> None:
    """Raise StoreError for a path below `where` that is absolute or has a step upward: a row or a file names it."""
    if path.startswith("/") or "\0" in path or "\\" in path or ".." in path.split("/"):
        what = f"a path leads out of the store: {path!r}"
        advice = "a store that names such a path was not written by this program: do not trust it"
        raise StoreError(what, where, "nothing outside of the store was touched", advice)


def check_links(directory: Path, path: str) -> None:
    """Raise StoreError where a symbolic link on the way to a path below `directory` leads out of `directory`.

    Whoever made the link could else have files there read, written to or deleted. `directory` itself may be a link.
    """
    place = str(directory)
    for part in path.split("/"):
        place = f"{place}/{part}"
        if os.path.islink(place) and not Path(place).resolve().is_relative_to(directory.resolve()):
            what = f"a symbolic link leads out of the store, to {os.readlink(place)!r}"
            advice = "remove the link; to have a store on another disk, put all of it there"
            raise StoreError(what, place, "nothing outside of the store was touched", advice)


def open_root(root: str, options: Mapping[str, str] | None = None) -> Root:
    """Find the file system of a path or of `s3://bucket/prefix`.

    `options` are the object store's, spelled as the environment variables that they come before (AWS_ENDPOINT_URL,
    AWS_REGION, ...). Raises LayoutError or StoreError for a place that cannot be used, before any request to it.
    """
    scheme, _, _ = root.rpartition("://")
    if scheme == "s3":
        return _object_store(root, options or {})
    if scheme or not root:
        what = f"a store cannot be at {root!r}"
        raise LayoutError(what, root, "nothing was touched", "name a directory or s3://bucket/prefix")
    directory = Path(root).expanduser().absolute()
    return Root(str(directory), pafs.SubTreeFileSystem(str(directory), pafs.LocalFileSystem()), directory, {})


def synchronise(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, each entry forced to the disk."""
    if directory.is_dir():
        return
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    # A directory that is new is lost with the power until the directory above it is on the disk.
    for each in missing:
        synchronise(each.parent)


def user_directory(parent: str | Path, name: str = "stagecoach") -> Path:
    """Return the path of this user's directory below one that users share, such as /tmp; see make_private_directory."""
    return Path(parent, f"{name}-{os.getuid()}")


def make_private_directory(directory: Path) -> None:
    """Make a directory that this user alone can enter, mode 0700, or check an existing one.

    Below a shared directory any user may have made one of the same name first, and could exchange what lies in it.
    Raises StoreError for a symbolic link, what is no directory, another owner, and a mode that lets others write.
    """
    make_directory(directory.parent)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = os.lstat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or mode & 0o022:
        what = f"no directory of this user alone for sockets and weights: owner {status.st_uid}, mode {mode:04o}"
        advice = "remove it, or set TMPDIR (for weights in memory: learner.memory_directory) to a directory of yours"
        raise StoreError(what, str(directory), "nothing was written", advice)
    if mode & 0o077:
        directory.chmod(0o700)


def _write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a new file and, if `durable`, force it to the disk, not yet its name."""
    try:
        with open(path, "xb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
    except FileExistsError:
        # Another's file, which is not ours to remove.
        raise
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _write_draft(path: Path, data: bytes, durable: bool = True) -> Path:
    """Write a file beside a path, durable where it says so, whose own name may be lost with the power."""
    make_directory(path.parent)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    _write_file(draft, data, durable)
    return draft


def _create_durably(path: Path, data: bytes) -> bool:
    """A draft beside the file is linked to its name, which fails where the name is taken."""
    draft = _write_draft(path, data)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
        # One entry for both: nobody looks for a draft after a loss of power.
        synchronise(path.parent)
    return True


def _object_store(root: str, options: Mapping[str, str]) -> Root:
    found = settings(options)
    bucket = locate(root, found)
    with border("opening the object store", bucket.address):
        files = file_system(bucket)
    base = f"{bucket.name}{'/' if bucket.prefix else ''}{bucket.prefix}"
    return Root(bucket.address, pafs.SubTreeFileSystem(base, files), None, found, bucket)
