"""Signatures of requests to S3: AWS Signature Version 4, as AWS documents it ("Create a signed AWS API request")."""

import hashlib
import hmac
from collections.abc import Mapping


def authorize(
    method: str,
    path: str,
    headers: Mapping[str, str],
    digest: str,
    access_key: str,
    secret_key: str,
    region: str,
    query: str = "",
) -> str:
    """The Authorization header of a request: all `headers` signed, names in lower case.

    `path` and `query` are percent-encoded, the query's names sorted and each with a value; `digest` is the SHA-256 of
    the body in hexadecimal; `x-amz-date` is among the headers.
    """
    names = sorted(headers)
    canonical = [
        method,
        path,
        query,
        *(f"{name}:{headers[name].strip()}" for name in names),
        "",
        ";".join(names),
        digest,
    ]
    now = headers["x-amz-date"]
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    hashed = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}".encode(), "sha256").hex()
    return f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
