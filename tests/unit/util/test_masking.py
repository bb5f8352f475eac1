"""Secrets in command lines are found by name and by form, and what only sounds like one is left alone."""

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.util.masking import find_secret, is_secret_variable, mask_words, refuse_secrets

GITHUB = "ghp_" + "a1" * 18


@pytest.mark.parametrize(
    ("words", "masked", "name"),
    [
        (["x", "--api-key=abc"], ["x", "--api-key=***"], "--api-key"),
        (["x", "--hf-token", "abc"], ["x", "--hf-token", "***"], "--hf-token"),
        (["x", "--wandb_key", "12", "y"], ["x", "--wandb_key", "***", "y"], "--wandb_key"),
        (["env", "DB_PASSWORD=abc", "x"], ["env", "DB_PASSWORD=***", "x"], "DB_PASSWORD"),
        (["--set", "token=abc"], ["--set", "token=***"], "token"),
        (["--env=HF_TOKEN=abc"], ["--env=HF_TOKEN=***"], "--env"),
        (["x", GITHUB], ["x", "***"], "a word"),
        (["x", f"--header=Bearer:{GITHUB}"], ["x", "--header=Bearer:***"], "--header"),
        (["clone", "https://me:pass@host/x"], ["clone", "https://***@host/x"], "a word"),
        (["sh", "-c", "x --secret abc"], ["sh", "-c", "x --secret '***'"], "--secret"),
        (["--command", "sh -c 'A_TOKEN=abc x'"], ["--command", "sh -c 'A_TOKEN=*** x'"], "A_TOKEN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_secret_is_masked_and_named(words: list[str], masked: list[str], name: str) -> None:
    found = list(mask_words(words))
    assert "abc" not in str(found)
    quotes = str.maketrans("", "", "'\"")
    assert [word.translate(quotes) for word in found] == [word.translate(quotes) for word in masked]
    assert find_secret(words) == name
    with pytest.raises(UsageError, match="looks like a secret"):
        refuse_secrets(words, "--command")


@pytest.mark.parametrize(
    "words",
    [
        ["x", "--max-tokens", "100", "--tokenizer", "gpt2", "--pad-token", "0", "--eos_token=</s>"],
        ["x", "--num-key-value-heads=4", "--key-dim", "64", "--key", "batch", "--auth", "none"],
        ["sh", "-c", "x --api-key $KEY --token=${TOKEN}"],
        ["x", "--token", "--verbose"],
        ["x", "--private-key", "/run/secrets/key", "--password-file=secret.txt", "--token="],
        ["env", "TOKENIZERS_PARALLELISM=false", "x"],
        ["x", "an unclosed ' quote", "", "=", "--=", "a=b=c"],
        ["python", "-c", "token = 3"],
        ["x", "https://host:8080/x?y=z", "sk-learn"],
    ],
    ids=" ".join,
)
def test_what_only_sounds_like_one_is_left_alone(words: list[str]) -> None:
    assert mask_words(words) == tuple(words)
    assert find_secret(words) is None
    refuse_secrets(words, "--command")


def test_variables() -> None:
    assert is_secret_variable("HF_TOKEN")
    assert is_secret_variable("aws_secret_access_key")
    assert not is_secret_variable("TOKENIZERS_PARALLELISM")
