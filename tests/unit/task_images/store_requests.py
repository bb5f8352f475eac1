"""A store that counts what ranks, as threads, ask of it before and after a training."""

import threading
from datetime import timedelta

from torch.distributed import HashStore  # type: ignore[attr-defined]

from task_images.world import await_everyone

SECONDS = 300.0


class CountingStore:
    """One rank's view of a store."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.requests, self.bytes = store, 0, 0

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._store.set(key, value)

    def append(self, key: str, value: str) -> None:
        self._count(key, value)
        self._store.append(key, value)  # type: ignore[attr-defined]

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        return self._store.add(key, amount)

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        self._count(key, found)
        return found

    def wait(self, keys: list[str], seconds: timedelta) -> None:
        self._count(*keys)
        self._store.wait(keys, seconds)

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return self._store.check(keys)

    def _count(self, *texts: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(len(text) for text in texts)


def count(size: int) -> list[tuple[int, int]]:
    """Requests and bytes of every rank."""
    store = HashStore()
    views = [CountingStore(store) for _ in range(size)]

    def meet(rank: int) -> None:
        view = views[rank]
        await_everyone(view, "here", rank, size, SECONDS)
        await_everyone(view, "loaded", rank, size, SECONDS)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(view.requests, view.bytes) for view in views]
