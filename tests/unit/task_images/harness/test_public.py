"""The stable face of the harness has every name that it promises, and documents each."""

from task_images.harness import public


def test_every_name_exists_and_is_documented() -> None:
    assert not [name for name in public.__all__ if not hasattr(public, name)]
    text = public.__doc__ or ""
    assert not [name for name in public.__all__ if name not in text and name not in ("World", "Reporter")]
