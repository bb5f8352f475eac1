from tests.contract.task_images.conftest import ranks

__all__ = ["ranks"]
