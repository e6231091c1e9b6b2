"""Which texts can name a directory of checkpoints."""

import pytest

from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.policy_keys.paths import path_problem


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("s3://", "s3://bucket/run"), ("GS://b/x", "gs://bucket/run"),
        ("s3:/b/x", "s3://bucket/run"), ("s3://b//x", "between two slashes"),
        ("s3://b/./x", "between two slashes"), ("s3://b/x/..", "between two slashes"),
        ("s3:///b/x", "between two slashes"), ("s3://b/x?a=b", "an option"),
        ("s3://me:word@b/x", "keys and options stand in the environment"),
        ("hdfs://node/x", "a place in an object store"), ("file:///mnt/x", "without file://"),
        ("$SCRATCH/ckpt", "the variable $SCRATCH"), ("/mnt/${JOB}/x", "the variable ${JOB}"),
        ("a\ud800", "no file name can hold"),
        ("a\0b", "control characters"), ("a\nb", "control characters"), (" ", "empty"),
        ("/mnt/" + "x" * 256, "at most 255 bytes"), ("/mnt/" + "é" * 128, "at most 255 bytes"),
        ("/mnt" + "/x" * 3000, "at most 4095 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_directory_is_said(path: str, said: str) -> None:
    """With what to do; a goal refuses it, too, whoever made it."""
    assert said in path_problem(path)
    with pytest.raises(ConfigError, match=r"disk\.path: expected"):
        Goal(storage_path=path)


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket",
        "gs://bucket/run-7",
        "az://container/a b",
        "checkpoints",
        "/mnt/a b/é",
        "~/ckpt",
        "../x",
        "run:7/x",
        "/a/s3://b",
        "x$",
        "a{b}",
    ],
)
def test_everything_else_can_be_one(path: str) -> None:
    """Odd names are the user's own business."""
    assert path_problem(path) == ""
    assert Goal(storage_path=path).storage_path == path
