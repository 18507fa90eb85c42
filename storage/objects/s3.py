"""Where an S3 store is and how it is reached: a URL and environment variables, made one spelling for every library.

Arrow, Delta, Polars and our own requests are given the same settings, with the same patience.
"""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from storage.errors import LayoutError, StoreError
from storage.objects.buckets import SECONDS_TO_ANSWER, SECONDS_TO_CONNECT, TRIALS, Bucket

SETTINGS = (
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ALLOW_HTTP",
)
PLACE = re.compile(r"s3a?://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]*)(?P<prefix>(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*)/*")


def settings(options: Mapping[str, str]) -> dict[str, str]:
    """The settings of the object store, given ones before the environment's; those without a value are left out."""
    found = {name: options.get(name) or os.environ.get(name, "") for name in SETTINGS}
    found["AWS_REGION"] = found["AWS_REGION"] or os.environ.get("AWS_DEFAULT_REGION", "") or "us-east-1"
    return {name: value for name, value in found.items() if value}


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
    small_at_once: dict[str, Any] = {"allow_delayed_open": True}  # unknown to Arrow's type hints
    return pafs.S3FileSystem(
        access_key=bucket.access_key,
        secret_key=bucket.secret_key,
        session_token=bucket.session_token or None,
        region=bucket.region,
        scheme="https" if split.scheme == "https" else "http",
        endpoint_override=split.netloc,
        connect_timeout=SECONDS_TO_CONNECT,
        request_timeout=SECONDS_TO_ANSWER,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=TRIALS),
        **small_at_once,
    )


def commit_options(found: Mapping[str, str]) -> dict[str, str]:
    """What Delta is given: the settings, conditional puts for commits, our patience.

    Without `aws_conditional_put` being etag two writers could both write the same version of a table.
    """
    patience = {
        "connect_timeout": f"{SECONDS_TO_CONNECT}s",
        "timeout": f"{SECONDS_TO_ANSWER}s",
        "max_retries": str(TRIALS),
        "retry_timeout": f"{SECONDS_TO_ANSWER}s",
    }
    return {**found, **patience, "aws_conditional_put": "etag"}
