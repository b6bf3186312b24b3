"""A fork of the test's own process, which must end well."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def in_a_child(body: Callable[[Callable[[], object]], object]) -> Callable[[], None]:
    """Run ``body(wait)`` in a fork; returns a function that lets ``wait`` return, and raises if the body raised.
    Torch's threads hang in a fork."""
    begin, go = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(go)
            body(lambda: os.read(begin, 1))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(begin)

    def end() -> None:
        os.close(go)
        assert os.waitpid(child, 0)[1] == 0

    return end
