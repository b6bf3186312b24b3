"""The number that an object of the user's keeps in its attribute ``epoch``, as torch's samplers do.

If it is another one than we have told it last, the user has set it, and asks for that epoch.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from penstock._errors import suppress_own

_told: dict[int, int | None] = {}
"""What each object kept when it was last told, or answered, by its id while it lives. Two loaders may share it."""
_deaf: set[int] = set()
"""Those that do not keep what they are told: their number, if they have one, means something else."""


def tell_epoch(one: Any, epoch: int) -> None:
    """Call ``one.set_epoch(epoch)``, which is no call of the user's."""
    try:
        one.set_epoch(epoch)
    except StopIteration as exc:  # it would end a loop
        raise RuntimeError(f"{type(one).__name__}.set_epoch({epoch}) raised StopIteration.") from exc
    answer(one)
    (_deaf.discard if _told[id(one)] == epoch else _deaf.add)(id(one))


def answer(one: Any) -> None:
    """What ``one`` keeps now is no request, or no longer one."""
    if id(one) not in _told:
        with suppress(TypeError):  # it does not support weak references
            weakref.finalize(one, _forget, id(one)).atexit = False
    _told[id(one)] = number_of(one)


def keeps(one: Any) -> bool:
    """Whether ``one`` keeps the number that it is told, as far as is known."""
    return id(one) not in _deaf and number_of(one) is not None


def follows(one: Any) -> bool:
    """Whether ``one`` keeps the number that it was told last, so that nobody else has told it one since."""
    return keeps(one) and id(one) in _told and _told[id(one)] == number_of(one)


def asked(one: Any) -> int | None:
    """The epoch that the user has set on ``one``; None if it is what it was told, or 0 before it was told anything."""
    now = number_of(one)
    return None if now is None or now == (_told.get(id(one)) or 0) else now


def number_of(one: Any) -> int | None:
    """The number in the attribute ``epoch``, of any whole type; None if there is none."""
    with suppress_own():
        if not isinstance(value := one.epoch, bool) and (number := int(value)) == value and number >= 0:
            return number
    return None


def _forget(key: int) -> None:
    _told.pop(key, None)
    _deaf.discard(key)


def is_told(one: Any) -> bool:
    """Whether ``one`` is an object of a class with a ``set_epoch``."""
    return not isinstance(one, type) and callable(getattr(type(one), "set_epoch", None))
