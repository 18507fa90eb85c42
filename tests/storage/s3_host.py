"""Starts the S3 server of the tests, and talks to it behind the back of the product."""

import os
import subprocess
import sys
import urllib.request
from urllib.parse import urlencode
from uuid import uuid4

from tests.waiting import PATIENCE

BUCKET = "bucket"


class S3Host:
    """A running server with one empty bucket, or with none where it is to check signatures.

    After `num_unsigned` requests, if given, it lets nobody in without a signature by a key that it has given out.
    """

    def __init__(self, num_unsigned: int | None = None) -> None:
        command = [sys.executable, "-m", "tests.storage.s3_server", str(os.getpid())]
        checks = {} if num_unsigned is None else {"INITIAL_NO_AUTH_ACTION_COUNT": str(num_unsigned)}
        self._process = subprocess.Popen(command, env=os.environ | checks, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        if num_unsigned is None:
            self._ask("PUT", f"/{BUCKET}")

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which the product finds the server; nothing else is needed."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "very secret",
            "AWS_ALLOW_HTTP": "true",
        }

    def new_place(self) -> str:
        """The URL of a place in the bucket where nothing is yet."""
        return f"s3://{BUCKET}/{uuid4().hex[:8]}/store"

    def behave(self, **mode: str) -> None:
        """Let the server misbehave in these ways; well again without any."""
        self._ask("PUT", f"/-/mode?{urlencode(mode)}")

    def requests(self) -> list[str]:
        """The requests since the last look."""
        return self._ask("GET", "/-/requests").splitlines()

    def put(self, url: str, data: bytes) -> None:
        """Put an object."""
        self._ask("PUT", url.removeprefix("s3:/"), data)

    def get(self, url: str) -> bytes:
        """The bytes of an object."""
        return self._ask("GET", url.removeprefix("s3:/")).encode()

    def stop(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, method: str, path: str, data: bytes | None = None) -> str:
        # The server takes a request for one to S3 by the name of the service in its signature, which it does not check.
        signed = "AWS4-HMAC-SHA256 Credential=a/20261121/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        headers = {"Authorization": signed, "Content-Type": "application/octet-stream"}
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return str(answer.read().decode())
