"""Policies in an object store: uploaded under a name of their own, then named by a manifest, put only where none is.

What a killed upload left is named by no manifest: nobody sees it, and maintenance removes it a day later.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pyarrow.fs as pafs

from storage.errors import DamagedSlice, border
from storage.policies.manifest import MANIFEST, PolicyManifest, check_files, manifest_text, parse_manifest
from storage.policies.scratch import ScratchDirectories
from storage.refs import File
from storage.roots import Root

CHUNK = 1 << 22
MIN_COPIES = 4
"""Local copies of policies that stay whatever their age."""
COPY_SECONDS = 3600
"""How long a local copy stays after it was last asked for: whoever asked may be about to read it."""


class RemotePolicies:
    """Puts policies into an object store and keeps local copies of those asked for."""

    def __init__(self, root: Root, copies: Path, scratches: ScratchDirectories) -> None:
        self._root = root
        self._copies = copies
        self._scratches = scratches

    def put(self, source: Path, policy_key: str, weights_sha256: str, files: Sequence[File]) -> None:
        """Upload a new policy; where another process was first with the key, its policy stands and ours is removed."""
        below = self._upload(source, policy_key, files)
        name = f"policies/{policy_key}/{MANIFEST}"
        if self._root.create(name, manifest_text(weights_sha256, files, below).encode()):
            return
        if parse_manifest(self._root.read(name), policy_key).place != f"policies/{policy_key}{below}":
            self._remove([f"policies/{policy_key}{below}/{file.path}" for file in files])

    def add(self, source: Path, standing: PolicyManifest, files: Sequence[File]) -> None:
        """Upload files that a policy lacks; its new manifest names them as well."""
        below = self._upload(source, standing.policy_key, files)
        top = f"policies/{standing.policy_key}"
        places = {path: place.removeprefix(top) for path, place in standing.added.items()}
        added = {**places, **{file.path: below for file in files}}
        text = manifest_text(
            standing.weights_sha256, (*standing.files, *files), standing.place.removeprefix(top), added
        )
        self._root.write(f"{top}/{MANIFEST}", text.encode())

    def copy(self, policy: PolicyManifest) -> Path:
        """A local directory with the policy's files: an earlier copy of the right sizes, else a verified download."""
        target = self._copy_directory(policy)
        try:
            check_files(target, policy.files, verify=False)
        except DamagedSlice:
            shutil.rmtree(target, ignore_errors=True)
            self._download(policy, target)
        with suppress(FileNotFoundError):
            os.utime(target)
        return target

    def adopt_copy(self, source: Path, policy: PolicyManifest) -> None:
        """Make a scratch directory with exactly the policy's files its local copy, which saves the download."""
        self._move_copy(source, self._copy_directory(policy))

    def remove_unfinished(self, hours: float) -> int:
        """Delete what killed uploads left more than `hours` ago; return how many objects and unfinished uploads.

        Those are objects below policies that no manifest names, and uploads in parts, of anything in the store, that
        never ended. A download that began with a manifest since replaced is safe: files are only ever added to one.
        """
        oldest = datetime.now(UTC) - timedelta(hours=hours)
        with border("looking for what killed uploads left", self._root.child("policies")):
            found = [info for info in self._files("policies") if info.mtime is not None and info.mtime <= oldest]
            by_key: dict[str, list[str]] = {}
            for info in found:
                if info.path.split("/")[1].startswith("."):
                    continue  # markers about policies, such as those of removed weights
                by_key.setdefault(info.path.split("/")[1], []).append(info.path)
            orphans = [path for key, paths in by_key.items() for path in sorted(set(paths) - self._named_files(key))]
            self._remove(orphans)
            return len(orphans) + self._abort_uploads(oldest)

    def _upload(self, source: Path, policy_key: str, files: Sequence[File]) -> str:
        below = f"/{uuid4().hex[:12]}"
        for file in files:
            place = f"policies/{policy_key}{below}/{file.path}"
            with open(source / file.path, "rb") as read, self._root.writer(place) as write:
                shutil.copyfileobj(read, write, CHUNK)
        return below

    def _download(self, policy: PolicyManifest, target: Path) -> None:
        ours = self._scratches.make(policy.policy_key)
        try:
            with border(f"downloading policy {policy.policy_key!r}", self._root.child(policy.place)):
                for file in policy.files:
                    (ours / file.path).parent.mkdir(parents=True, exist_ok=True)
                    place = policy.place_of(file)
                    with self._root.files.open_input_stream(place) as read, open(ours / file.path, "wb") as write:
                        shutil.copyfileobj(read, write, CHUNK)
            check_files(ours, policy.files, verify=True)
            self._move_copy(ours, target)
        finally:
            self._scratches.discard(ours)

    def _move_copy(self, ours: Path, target: Path) -> None:
        self._drop_old_copies()
        try:
            os.rename(ours, target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise

    def _drop_old_copies(self) -> None:
        copies = [path for path in self._copies.iterdir() if path.is_dir() and not path.name.startswith(".")]
        used = {path: path.stat().st_mtime for path in copies}
        newest_first = sorted(copies, key=lambda path: -used[path])
        for path in newest_first[MIN_COPIES:]:
            if used[path] < time.time() - COPY_SECONDS:
                shutil.rmtree(path, ignore_errors=True)

    def _copy_directory(self, policy: PolicyManifest) -> Path:
        """The place of the local copy of exactly these files."""
        text = manifest_text(policy.weights_sha256, policy.files)
        return self._copies / f"{policy.policy_key}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _files(self, below: str) -> list[pafs.FileInfo]:
        found = self._root.files.get_file_info(pafs.FileSelector(below, allow_not_found=True, recursive=True))
        return [info for info in found if info.type == pafs.FileType.File]

    def _abort_uploads(self, oldest: datetime) -> int:
        bucket = self._root.bucket
        old = [each for each in bucket.unfinished_uploads() if each[2] <= oldest] if bucket is not None else []
        for key, upload, _ in old:
            assert bucket is not None
            bucket.abort_upload(key, upload)
        return len(old)

    def _named_files(self, policy_key: str) -> set[str]:
        name = f"policies/{policy_key}/{MANIFEST}"
        try:
            policy = parse_manifest(self._root.read(name), policy_key)
        except FileNotFoundError:
            return set()
        return {name, *(policy.place_of(file) for file in policy.files)}

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._root.delete(path)
