"""Memory of batches is used again, and never while somebody has a part of it."""

import gc
import threading

import numpy as np

from task_images.data import BufferPool


def test_a_buffer_comes_back_when_the_last_part_of_it_is_gone() -> None:
    pool = BufferPool(lambda: np.empty((4, 3), np.float32))
    first = pool.take()
    place = first.data_ptr()
    part = first[1:].permute(1, 0)
    del first
    gc.collect()
    assert pool.take().data_ptr() != place
    part.fill_(7.0)
    del part
    again = [pool.take() for _ in range(2)]
    assert place in [one.data_ptr() for one in again]
    assert len({one.data_ptr() for one in again}) == 2


def test_arrays_made_of_a_buffer_keep_it() -> None:
    pool = BufferPool(lambda: np.empty(8, np.uint8))
    array = pool.take().numpy()[2:5]
    array[:] = 1
    others = [pool.take() for _ in range(3)]
    for other in others:
        other.zero_()
    assert array.tolist() == [1, 1, 1]


def test_threads_share_a_pool() -> None:
    pool = BufferPool(lambda: np.empty(1000, np.int64))
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(200):
            mine = pool.take()
            mine.fill_(number)
            wrong.extend([number] * int((mine != number).sum()))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
