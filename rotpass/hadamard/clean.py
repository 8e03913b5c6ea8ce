"""Computing constants apart from whatever the caller is doing."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def clean(build: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``build(*args, **kwargs)`` in a thread of its own.

    Matrices are built at first use and kept, and first use may be inside a FakeTensorMode, a functorch transform,
    inference mode, autocast or a default-device context. Each of those is local to its thread, so in a new thread a
    constant comes out as a plain CPU tensor, which is safe to keep.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(build(*args, **kwargs))
        except BaseException as error:  # handed to the caller below, whatever it is
            failed.append(error)

    thread = threading.Thread(target=run, name="rotpass-constants")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
