"""Work of one call spread over threads.

``concurrent.futures`` takes no work once the main thread has ended, and a call may come from a thread that outlives it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["side_by_side"]

Item = TypeVar("Item")


def side_by_side(function: Callable[[Item], object], items: Iterable[Item], limit: int) -> None:
    """Calls ``function`` with each item, up to ``limit`` at a time, one of them in the caller's thread.

    Raises:
        What the first call that failed raised; calls that had not begun then are left out.
    """
    waiting, errors, lock = list(items)[::-1], list[BaseException](), threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                if not waiting:
                    return
                item = waiting.pop()
            try:
                function(item)
            except BaseException as error:
                errors.append(error)

    helpers = []
    for _ in range(min(limit, len(waiting)) - 1):
        helper = threading.Thread(target=work)
        try:
            helper.start()
        except RuntimeError:  # no more threads, or none any more in a process that ends: this one does the work
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
