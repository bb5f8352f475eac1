"""The stable face of the harness documents each name that it has."""

from task_images.harness import public


def test_every_name_is_documented() -> None:
    names = [name for name in vars(public) if not name.startswith("_")]
    text = public.__doc__ or ""
    assert not [name for name in names if name not in text and name not in ("World", "Reporter", "opening")]
    assert len(names) > 50
