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
        (["db=postgresql://:pass@db:5432/x"], ["db=postgresql://***@db:5432/x"], "db"),
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


# --- forms of keys, as their makers publish them ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "AKIA" + "A1B2C3D4E5F6G7H8",  # AWS: 16 letters and digits
        *(f"gh{kind}_" + "a" * 20 for kind in "pousr"),
        "github_pat_" + "a1" * 10,
        "glpat-" + "a" * 20,
        "hf_" + "a" * 20,
        "sk-" + "a" * 20,
        *(f"xox{kind}-" + "1" * 10 for kind in "abprs"),
        "AIza" + "a-_1" * 8,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbg",  # a JSON web token
    ],
)
def test_keys_of_well_known_services_are_masked_wherever_they_are(key: str) -> None:
    assert mask_words([key, f"--x={key}", f"a:{key}:b"]) == ("***", "--x=***", "a:***:b")
    assert find_secret(["x", key]) == "a word"
    assert find_secret(["x", f"--x={key}"]) == "--x"
    assert mask_words([f"x{key}"]) == (f"x{key}",)  # a part of a longer word


@pytest.mark.parametrize(
    ("option", "is_secret"),
    [
        *((name, True) for name in ("--api-key", "--api_key", "--apikey", "--access-token", "--auth-token")),
        *((name, True) for name in ("--secret", "--my-secret", "--client_secret", "--password", "--passwd")),
        *((name, True) for name in ("--passphrase", "--credential", "--credentials", "--bearer", "--token", "-token")),
        *((name, True) for name in ("--wandb-key", "--hf_token", "--x.hub_token", "--github-token", "--gitlab-token")),
        *((name, True) for name in ("--refresh-token", "--bearer-token", "--private-key", "--secret_key", "--API-KEY")),
        *((name, True) for name in ("--account-key", "--auth-key", "--wandb.api_key")),
        *((name, False) for name in ("--key", "--my-token", "--max-token", "--token-id", "--secrets", "--passwords")),
        *((name, False) for name in ("--keyboard", "--authentic", "--cache-key", "--bearers", "--tokens")),
    ],
)
def test_options_with_a_secret_are_known_by_their_whole_name(option: str, is_secret: bool) -> None:
    assert (mask_words([option, "abc"]) == (option, "***")) is is_secret
    assert (mask_words([f"{option}=abc"]) == (f"{option}=***",)) is is_secret
    assert find_secret([option, "abc"]) == (option if is_secret else None)


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("TOKENS", True),
        ("tokenizer", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("TOKENISER", False),
        ("CLIENT_SECRET", True),
        ("PGPASSWORD", True),
        ("PASSWD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("PRIVATE_KEY", True),
        ("APIKEY", True),
        ("WANDB_API_KEY", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("ACCESSKEY", True),
        ("PATH", False),
        ("KEY", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_variables_with_a_secret_are_known_by_a_part_of_their_name(name: str, is_secret: bool) -> None:
    assert is_secret_variable(name) is is_secret
    if name.isupper():
        assert (mask_words([f"{name}=abc"]) == (f"{name}=***",)) is is_secret


@pytest.mark.parametrize("value", ["$KEY", "${KEY}", "{key}", "/run/key", "./key", "~/key", ""])
def test_references_are_not_the_secret_itself(value: str) -> None:
    words = ["--api-key", value, f"--token={value}", f"A_TOKEN={value}"]
    assert mask_words(words) == tuple(words)
    assert find_secret(words) is None
