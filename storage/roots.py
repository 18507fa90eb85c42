"""The root of a store: one place on some file system, local or not, and how bytes get there and stay there."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from storage.errors import LayoutError, border
from storage.refs import File

OBJECT_STORES = ("s3", "gcs", "abfs")


@dataclass(frozen=True)
class Root:
    """One place that holds a store; all paths given to it are relative and use forward slashes.

    `directory` is the local directory, or None on any other file system; `address` is what table libraries are given.
    """

    address: str
    files: pafs.SubTreeFileSystem
    directory: Path | None
    options: Mapping[str, str]

    def child(self, path: str) -> str:
        """The address of something below the root."""
        return f"{self.address}/{path}"

    def exists(self, path: str) -> bool:
        """Say whether a file or directory is there."""
        return bool(self.files.get_file_info(path).type != pafs.FileType.NotFound)

    def names(self, path: str) -> list[str]:
        """The sorted names right below a directory; none where there is no directory."""
        found = self.files.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def read(self, path: str) -> bytes:
        """All bytes of a file; FileNotFoundError passes through."""
        with self.files.open_input_stream(path, compression=None) as stream:
            return bytes(stream.read())

    def write(self, path: str, data: bytes) -> File:
        """Write a new file so that it survives loss of power, and return its reference.

        The bytes hashed are those in memory, so that damage on the way to the disk shows when they are read.
        Raises NoSpace or StoreUnavailable; what was half written is then removed where possible.
        """
        with border(f"writing {len(data)} bytes", self.child(path)):
            if self.directory is None:
                with self.writer(path) as stream:
                    stream.write(data)
            else:
                _write_durably(self.directory / path, data)
        return File(path, len(data), hashlib.sha256(data).hexdigest())

    def writer(self, path: str) -> pa.NativeFile:
        """A stream into a new file of a file system that is not local; the file is there when it is closed."""
        if self.files.base_fs.type_name not in OBJECT_STORES:  # those know no directories
            self.files.create_dir(path.rpartition("/")[0], recursive=True)
        return self.files.open_output_stream(path, compression=None)

    def make_durable(self, *paths: str) -> None:
        """Force files that something else wrote to the disk, and their directories; nothing to do when not local."""
        if self.directory is None:
            return
        for path in paths:
            if (self.directory / path).exists():
                synchronise(self.directory / path)
        for parent in {(self.directory / path).parent for path in paths}:
            synchronise(parent)


def open_root(root: str, options: Mapping[str, str] | None = None) -> Root:
    """Find the file system of a path or URL (`s3://bucket/prefix`, `file:///...`).

    `options` are the object store's, spelled as Delta spells them (AWS_ENDPOINT_URL, AWS_REGION, ...).
    """
    scheme = urlsplit(root).scheme if "://" in root else ""
    if not root or (scheme == "file" and not urlsplit(root).path):
        raise LayoutError("the store's root is empty", root, "nothing was touched", "name a directory or a URL")
    if scheme in ("", "file"):
        directory = Path(root) if not scheme else Path(pafs.FileSystem.from_uri(root)[1])
        directory = directory.expanduser().absolute()
        if re.search("%[0-9A-Fa-f]{2}", str(directory)):
            what = "a path with a percent sign before two hex digits is taken apart by the table library"
            raise LayoutError(what, str(directory), "nothing was touched", "choose another name")
        files = pafs.SubTreeFileSystem(str(directory), pafs.LocalFileSystem())
        return Root(str(directory), files, directory, {})
    given = dict(options or {})
    with border("opening the store's file system", root):
        base, path = _object_store(scheme, root, given)
    return Root(root.partition("?")[0].rstrip("/"), pafs.SubTreeFileSystem(path, base), None, given)


def synchronise(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make a directory and its missing parents, each entry forced to the disk."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        synchronise(each.parent)


def _write_durably(path: Path, data: bytes) -> None:
    make_directory(path.parent)
    try:
        with open(path, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except FileExistsError:
        raise
    except OSError:
        path.unlink(missing_ok=True)
        raise
    synchronise(path.parent)


def _object_store(scheme: str, root: str, options: Mapping[str, str]) -> tuple[pafs.FileSystem, str]:
    if scheme not in ("s3", "s3a"):
        files, path = pafs.FileSystem.from_uri(root)
        return files, path
    read = {name: options.get(name, os.environ.get(name)) for name in ("AWS_ENDPOINT_URL", "AWS_REGION")}
    files = pafs.S3FileSystem(
        access_key=options.get("AWS_ACCESS_KEY_ID"),
        secret_key=options.get("AWS_SECRET_ACCESS_KEY"),
        session_token=options.get("AWS_SESSION_TOKEN"),
        region=read["AWS_REGION"],
        endpoint_override=read["AWS_ENDPOINT_URL"],
    )
    split = urlsplit(root)
    return files, f"{split.netloc}{split.path}".rstrip("/")
