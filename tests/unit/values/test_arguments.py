"""What looks like a secret is left out of arguments that are written down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.values.arguments import HIDDEN, without_secrets


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--api-key", "k3y", "--lr", "1"], ["--api-key", HIDDEN, "--lr", "1"]),
        (["--wandb_key=k3y"], [f"--wandb_key={HIDDEN}"]),
        (["+logger.api_key=k3y", "db.password=a b"],
         [f"+logger.api_key={HIDDEN}", f"db.password={HIDDEN}"]),
        (["--token", "k3y", "k3y"], ["--token", HIDDEN, "k3y"]),
        (["--push_to_hub_token", "k3y"], ["--push_to_hub_token", HIDDEN]),
        (["--secret", "--flag", "x"], ["--secret", "--flag", "x"]),
        (["-x", "hf_" + "a" * 34], ["-x", HIDDEN]),
        (["data=s3://me:word@host/bucket"], [f"data=s3://{HIDDEN}@host/bucket"]),
    ],
)  # fmt: skip
def test_secrets_are_hidden_and_their_options_stay(given: list[str], kept: list[str]) -> None:
    """By the name of the option, by the form of the key, in an address."""
    assert without_secrets(given) == tuple(kept)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "4096"], ["--pad-token", "<pad>"], ["--tokenizer=gpt2"],
        ["--sort-key", "n"], ["--keys", "a"], ["token_budget=8"], ["s3://bucket/run@7"],
        ["user@host:/data"],
        ["--resume", "2b9c5f4f2b9c5f4f2b9c5f4f2b9c5f4f2b9c5f4f"], ["--secretary", "x"], ["", "--"],
    ],
)  # fmt: skip
def test_what_only_resembles_one_is_kept(arguments: list[str]) -> None:
    """A report without the tokens of a batch would be useless."""
    assert without_secrets(arguments) == tuple(arguments)


@given(st.lists(st.text()))
def test_as_many_arguments_remain_and_nothing_is_hidden_twice(arguments: list[str]) -> None:
    """Whatever they are; what was cleaned once stays as it is."""
    cleaned = without_secrets(arguments)
    assert len(cleaned) == len(arguments)
    assert without_secrets(cleaned) == cleaned
