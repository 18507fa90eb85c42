"""An S3-compatible object store: where it is, how every library reaches it, and requests that only we send.

Arrow, Delta and Polars do nearly everything, with the same settings and the same patience. Two things they do not
offer, so these requests are sent here, signed by botocore: putting an object only where there is none, which decides
who was first, and deleting one without leaving a marker of its directory behind. Uploads in parts that a killed process
left are ended by botocore's client. obstore was tried in their place: see docs/decisions/store.md.
"""

import os
import re
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import pyarrow.fs as pafs

from storage.errors import LayoutError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    import httpx

SETTINGS = (
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ALLOW_HTTP",
)
# Only characters that all libraries spell the same way in a URL.
PLACE = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*)(?P<prefix>(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*)/*")
SECONDS_TO_CONNECT = 5
SECONDS_TO_ANSWER = 60
SECONDS_TO_KEEP = 60
"""How long a connection stays open without a request."""
ATTEMPTS = 4
FIRST_PAUSE = 0.2
"""Seconds before the second attempt at a request; doubled before each one after."""
DONE = (200, 204, 412)
"""Answers that say what was asked: 412 that a condition does not hold."""
AGAIN = (409, 429, 500, 502, 503, 504)
"""Answers that may be others a moment later; 409 is a conditional put that met another one under way."""


def _new_client() -> "httpx.Client":
    """The connections of all threads to a bucket; proxies of the environment are not for them."""
    import httpx

    # Where no server listens shows at once; an answer may take its time.
    timeout = httpx.Timeout(SECONDS_TO_ANSWER, connect=SECONDS_TO_CONNECT)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=SECONDS_TO_KEEP)
    plain = {"accept-encoding": "identity"}  # the bytes of an object are those that were put
    return httpx.Client(
        headers=plain, timeout=timeout, limits=limits, trust_env=False, verify=ssl.create_default_context()
    )


@dataclass(frozen=True)
class Bucket:
    """A bucket, a prefix in it, and what requests to it are signed with; keys given to it are below the prefix."""

    name: str
    prefix: str
    endpoint: str
    region: str
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    client: "httpx.Client" = field(default_factory=_new_client, repr=False, compare=False)

    @property
    def address(self) -> str:
        """The place as a URL."""
        return f"s3://{self.name}{'/' if self.prefix else ''}{self.prefix}"

    def get(self, key: str) -> bytes:
        """All bytes of an object; FileNotFoundError where there is none."""
        return self._request("GET", key)[1]

    def put_new(self, key: str, data: bytes) -> bool:
        """Put an object where there is none, whole or not at all; False where there is one already.

        Also False where an earlier attempt of ours succeeded and its answer was lost: read what is there.
        """
        return self._request("PUT", key, data, {"if-none-match": "*"})[0] != 412

    def delete(self, key: str) -> None:
        """Remove an object; one that is gone already is fine."""
        self._request("DELETE", key)

    def require_conditional_puts(self, key: str, data: bytes) -> None:
        """Raise StoreError unless the server refuses to put an object where there is one: `key`, which holds `data`.

        A server that ignored the condition would let two commits take the same number, and one would be lost
        silently. Where we may not write, nothing can be lost and nothing is said.
        """
        try:
            refused = not self.put_new(key, data)
        except PermissionError:
            return
        if not refused:
            raise self._no_conditions("it wrote over an object although it was told not to (If-None-Match)")

    def abort_uploads(self, oldest: datetime) -> int:
        """Drop the parts of uploads below the prefix that began before a moment and never ended; return how many.

        Not more than a thousand uploads; nobody sees them, but they are paid for.
        """
        from botocore.config import Config
        from botocore.session import get_session

        client = get_session().create_client(
            "s3",
            self.region,
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            aws_session_token=self.session_token or None,
            config=Config(s3={"addressing_style": "path"}),
        )
        below = f"{self.prefix}/" if self.prefix else ""
        uploads = client.list_multipart_uploads(Bucket=self.name, Prefix=below).get("Uploads", ())
        old = [upload for upload in uploads if upload["Initiated"] <= oldest]
        for upload in old:
            with suppress(client.exceptions.NoSuchUpload):  # one that is gone already is fine
                client.abort_multipart_upload(Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(old)

    def _request(
        self, method: str, key: str, data: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        import httpx

        path = f"/{self.name}/{self.prefix}{'/' if self.prefix else ''}{key}"
        url = f"{self.endpoint}{quote(path, safe='/-_.~')}"
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                signed = self._sign(method, url, data, headers or {})
                response = self.client.request(method, url, content=data, headers=signed)
            except httpx.RequestError as error:
                # A server that was silent for a minute is not asked again: the user would wait for several.
                if attempt == ATTEMPTS or isinstance(error, httpx.TimeoutException):
                    raise self._unreachable(error) from error
            else:
                status, body = response.status_code, response.content
                if status in DONE:
                    return status, body
                if status not in AGAIN or attempt == ATTEMPTS:
                    raise self._refusal(method, key, status, body)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def _sign(self, method: str, url: str, data: bytes, headers: Mapping[str, str]) -> dict[str, str]:
        # A tenth of a second to import, for stores in buckets alone.
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        # With the host as it is sent: botocore would sign it in small letters, without a port that is the usual one.
        request = AWSRequest(method, url, {**headers, "host": urlsplit(self.endpoint).netloc}, data)
        credentials = Credentials(self.access_key, self.secret_key, self.session_token or None)
        S3SigV4Auth(credentials, "s3", self.region).add_auth(request)
        return dict(request.headers.items())

    def _unreachable(self, error: BaseException) -> StoreUnavailable:
        what = f"the object store does not answer: {type(error).__name__}: {error}"
        advice = "check AWS_ENDPOINT_URL and that the server runs, then run the same again"
        return StoreUnavailable(what, f"{self.address} at {self.endpoint}", "everything that the ledger names", advice)

    def _no_conditions(self, how: str) -> LayoutError:
        what = f"the object store does not keep writers apart: {how}"
        advice = (
            "two writers would lose each other's commits without notice; take a server with conditional puts (AWS S3, "
            "a current MinIO), or a store in a directory"
        )
        return LayoutError(what, f"{self.address} at {self.endpoint}", "nothing else was written", advice)

    def _refusal(self, method: str, key: str, status: int, body: bytes) -> StoreError | OSError:
        """The error for an answer that is none of those hoped for."""
        code = _tag_text(body, b"Code") or str(status)
        if code == "NoSuchKey":
            return FileNotFoundError(f"{self.address}/{key}")
        if method == "PUT" and status in (400, 501):
            return self._no_conditions(f"it answered a put with the condition If-None-Match with {status} {code}")
        if method == "PUT" and status in (401, 403):
            return PermissionError(f"{self.address}/{key}: {status} {code}")
        what = f"the object store answered {method} with {status} {code}: {_tag_text(body, b'Message')[:200]}"
        advice = (
            f"check the bucket {self.name!r}, AWS_REGION ({self.region}), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
            "AWS_SESSION_TOKEN, and that the server is S3-compatible, then run the same again"
        )
        return StoreUnavailable(what, f"{self.address} at {self.endpoint}", "nothing was written", advice)


def settings(options: Mapping[str, str]) -> dict[str, str]:
    """The settings of the object store, given ones before the environment's; those without a value are left out."""
    values = {name: options.get(name) or os.environ.get(name, "") for name in SETTINGS}
    values["AWS_REGION"] = values["AWS_REGION"] or os.environ.get("AWS_DEFAULT_REGION", "") or "us-east-1"
    return {name: value for name, value in values.items() if value}


def locate(url: str, found: Mapping[str, str]) -> Bucket:
    """The place that `s3://bucket/prefix` names, with settings; LayoutError where either cannot be used."""
    match = PLACE.fullmatch(url)
    if match is None:
        what = "the store's URL is not s3://bucket/prefix of letters, digits, dots, dashes and underscores"
        raise LayoutError(what, url, "nothing was touched", "choose another name; settings are environment variables")
    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if name not in found]
    if missing:
        what = f"there are no credentials for the object store: {' and '.join(missing)} not set"
        raise StoreError(what, url, "nothing was touched", "set them in the environment")
    region = found["AWS_REGION"]
    endpoint = found.get("AWS_ENDPOINT_URL", f"https://s3.{region}.amazonaws.com").rstrip("/")
    if urlsplit(endpoint).scheme not in ("http", "https") or urlsplit(endpoint).path:
        advice = "name it as http(s)://host:port"
        raise LayoutError("AWS_ENDPOINT_URL is no address of a server", endpoint, "nothing was touched", advice)
    if endpoint.startswith("http://") and found.get("AWS_ALLOW_HTTP", "").lower() not in ("true", "1"):
        what = "AWS_ENDPOINT_URL is an http address: whoever listens on the way reads every byte"
        advice = "set AWS_ALLOW_HTTP=true if that is fine, as on this machine, or name an https address"
        raise StoreError(what, endpoint, "nothing was touched", advice)
    keys = found["AWS_ACCESS_KEY_ID"], found["AWS_SECRET_ACCESS_KEY"], found.get("AWS_SESSION_TOKEN", "")
    return Bucket(match["bucket"], match["prefix"].strip("/"), endpoint, region, *keys)


def file_system(bucket: Bucket) -> pafs.S3FileSystem:
    """Arrow's file system for a bucket; small files are put with one request."""
    split = urlsplit(bucket.endpoint)
    return pafs.S3FileSystem(  # type: ignore[call-arg]
        access_key=bucket.access_key,
        secret_key=bucket.secret_key,
        session_token=bucket.session_token or None,
        region=bucket.region,
        scheme="https" if split.scheme == "https" else "http",
        endpoint_override=split.netloc,
        connect_timeout=SECONDS_TO_CONNECT,
        request_timeout=SECONDS_TO_ANSWER,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # unknown to Arrow's type hints
    )


def _tag_text(body: bytes, tag: bytes) -> str:
    found = re.search(b"<" + tag + b">([^<]*)</" + tag + b">", body)
    return found[1].decode(errors="replace") if found else ""
