"""The stable interface for custom tasks documents each name that it has."""

from task_images import public


def test_every_name_is_documented() -> None:
    names = [name for name in vars(public) if not name.startswith("_")]
    text = public.__doc__ or ""
    assert not [name for name in names if name not in text and name not in ("World", "Reporter")]
    assert {"Contract", "Tracker", "TaskError"} < set(names)
