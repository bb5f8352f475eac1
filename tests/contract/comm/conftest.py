from tests.contract.tasks.conftest import ranks

__all__ = ["ranks"]
