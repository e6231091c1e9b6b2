"""Uploads in parts that were cut off: S3 bills their parts, although no object is there.

The library neither lists nor ends them, so the two requests are made and signed here.  That needs
keys in the environment or in the credentials file.  Elsewhere a rule of the bucket has to do it.
"""

import contextlib
import hashlib
import hmac
import html
import os
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from autockpt.executors.storage.places import account
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.generation import Generation

TIMEOUT_S = 10.0
"""For one request."""
SWEEP_S = 15.0
"""For the uploads that a start ends, in front of its first commit; the next start goes on."""
_UPLOAD = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_NOTHING = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """An upload of a shard that was begun and never completed."""

    bucket: str
    key: str
    """Name of the object that it would have become."""
    upload_id: str
    term: int
    """Of the start that began it."""


def unfinished_uploads(url: str, generation: Generation | None = None) -> list[UnfinishedUpload]:
    """Uploads of generations under a URL of S3, at most a thousand; none of another store.

    `generation`: of this one alone.  A living run has some, too.

    Raises StorageError where they cannot be listed.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.strip("/").partition("/")
    if scheme not in ("s3", "s3a"):
        return []
    within = [] if generation is None else [generation.name]
    query = {"uploads": "", "prefix": "".join(f"{one}/" for one in filter(None, [prefix, *within]))}
    listed = _ask("GET", bucket, "", query)
    if listed == _FAILED:
        raise StorageError(
            f"{url}: uploads that were cut off cannot be listed: no keys stand in the environment "
            "or the credentials file, or the store refuses. Let a rule of the bucket delete them"
        )
    found = []
    for text in _UPLOAD.findall(listed):
        key, upload_id = _entry(text, "Key"), _entry(text, "UploadId")
        folder = key.removeprefix(f"{prefix}/").partition("/")[0]
        with contextlib.suppress(ConfigError):
            term = Generation.from_name(folder).term
            found.append(UnfinishedUpload(bucket=bucket, key=key, upload_id=upload_id, term=term))
    return found


def end_upload(upload: UnfinishedUpload) -> bool:
    """Removes its parts; False where the store did not."""
    return _ask("DELETE", upload.bucket, upload.key, {"uploadId": upload.upload_id}) != _FAILED


def end_uploads_before(url: str, term: int) -> int:
    """Ends what starts before `term` have begun: none of it can become durable.  Their number.

    It stops at the first failure, and after `SWEEP_S`.
    """
    deadline, count = time.monotonic() + SWEEP_S, 0
    with contextlib.suppress(StorageError):
        for upload in unfinished_uploads(url):
            if upload.term < term:
                if time.monotonic() >= deadline or not end_upload(upload):
                    break
                count += 1
    return count


def end_uploads_of(url: str, generation: Generation) -> bool:
    """Ends the uploads of one generation; False where some are left, or that is unknown.

    Where there are no keys a rule of the bucket has to do it: True.
    """
    deadline = time.monotonic() + SWEEP_S
    if not account.s3_keys():
        return True
    try:
        found = unfinished_uploads(url, generation)
    except StorageError:
        return False
    return all(time.monotonic() < deadline and end_upload(upload) for upload in found)


_FAILED = "no answer"


def _ask(method: str, bucket: str, key: str, query: Mapping[str, str]) -> str:
    """The text of the answer; `_FAILED` where the store gives none."""
    keys = account.s3_keys()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
    endpoint = (endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
    if not keys or not endpoint.startswith(("https://", "http://")):
        return _FAILED
    # Here, because a job on a disk asks no store, and each of its processes would load them.
    import http.client
    import urllib.request

    path = urllib.parse.quote(f"/{bucket}/{key}".rstrip("/"))
    listed = _query(query)
    request = urllib.request.Request(f"{endpoint}{path}?{listed}", method=method)
    request.headers = _signed(method, request.host, path, listed, keys, region)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return str(answer.read(2**24), "utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException):
        return _FAILED


def _signed(
    method: str, host: str, path: str, query: str, keys: Mapping[str, str], region: str
) -> dict[str, str]:
    """Headers of a request without a body.  Source: AWS Signature Version 4."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    headers = {"host": host, "x-amz-content-sha256": _NOTHING, "x-amz-date": moment}
    if "token" in keys:
        headers["x-amz-security-token"] = keys["token"]
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    canonical = "\n".join([method, path, query, *lines, "", names, _NOTHING])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, digest])
    key = f"AWS4{keys['secret_access_key']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return {
        **headers,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={keys['access_key_id']}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}",
    }


def _query(entries: Mapping[str, str]) -> str:
    """As it is signed: sorted, and each blank is %20."""
    pairs = sorted(entries.items())
    return urllib.parse.urlencode(pairs, quote_via=urllib.parse.quote, safe="")


def _entry(text: str, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return html.unescape(found[1]) if found else ""
