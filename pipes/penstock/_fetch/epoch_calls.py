"""Hears who calls ``set_epoch`` on the user's own objects: the user, or we.

A script that resumes by the number of an epoch calls ``sampler.set_epoch(3)``, and nothing of the loader. So the class
of an object that is listened to notes each call. What the object makes of the number does not matter: a sum, a seeded
generator, a tensor, an order. (To look for the number in the attributes was tried. It misses all of these, and takes
other attributes for it.) An assignment to an attribute ``epoch`` counts as a call.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextlib import suppress
from contextvars import ContextVar
from types import FunctionType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any, final

from penstock._errors import suppress_own

if TYPE_CHECKING:
    from collections.abc import Callable

_inside: ContextVar[bool] = ContextVar("penstock_set_epoch", default=False)
"""A ``set_epoch`` runs in this thread: ours, or one whose inner calls do not count."""


@final
class Heard:
    """The calls on one object.

    Attributes:
        calls: How many the user has made.
        asked: The number in the last one.
        is_users: The user's call, and not ours, was the last.
        kept: The number that the object keeps in its attribute ``epoch`` since then, if it has one.
    """

    def __init__(self, one: Any) -> None:
        self.kept = _kept(one)
        self.is_users = bool(self.kept)  # somebody has set it before we listened
        self.calls, self.asked = int(self.is_users), self.kept

    def look(self, one: Any) -> None:
        """See whether somebody has assigned another number."""
        if (now := _kept(one)) is not None and now != self.kept:
            self.note(now)
            self.kept = now

    def note(self, epoch: int) -> None:
        self.calls, self.asked, self.is_users = self.calls + 1, epoch, True


_heard: dict[int, Heard] = {}  # by the id of the object, while it lives


def listen(one: Any) -> Heard:
    """Listen to the calls on ``one``, from now on."""
    if id(one) not in _heard:
        _heard[id(one)] = Heard(one)
        with suppress(TypeError):  # it does not support weak references
            weakref.finalize(one, _heard.pop, id(one), None).atexit = False
        for kind in type(one).__mro__:
            if "set_epoch" in vars(kind):
                original = vars(kind)["set_epoch"]
                if isinstance(original, FunctionType):
                    kind.set_epoch = Hearing(original)  # type: ignore[attr-defined]
                break
    return _heard[id(one)]


def is_told(one: Any) -> bool:
    """Whether ``one`` is an object of a class with a ``set_epoch``."""
    return not isinstance(one, type) and callable(getattr(type(one), "set_epoch", None))


def tell_epoch(one: Any, epoch: int) -> None:
    """Call ``one.set_epoch(epoch)``, which is no call of the user's."""
    token = _inside.set(True)
    try:
        one.set_epoch(epoch)
    finally:
        _inside.reset(token)
    if (heard := _heard.get(id(one))) is not None:
        heard.kept, heard.is_users = _kept(one), False


@final
class Hearing:
    """A method ``set_epoch`` that notes who calls it.

    An object, because a pickle by value (of a class in a notebook) must not copy this module.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        functools.update_wrapper(self, original)

    def __get__(self, one: Any, kind: type | None = None) -> Any:
        return self if one is None else MethodType(self, one)

    def __reduce__(self) -> Any:
        return Hearing, (self.original,)

    def __call__(self, one: Any, *args: Any, **kwargs: Any) -> Any:
        heard, outer = _heard.get(id(one)), _inside.get()
        token = _inside.set(True)
        try:
            result = self.original(one, *args, **kwargs)
        finally:
            _inside.reset(token)
        if heard is not None:
            number = _whole(next(iter((*args, *kwargs.values())), None))
            if not outer and number is not None:
                heard.note(number)
            heard.kept = _kept(one)
        return result


def _kept(one: Any) -> int | None:
    """The number in the attribute ``epoch`` of the object itself, not of its class, which copies share."""
    of_itself = "epoch" in getattr(one, "__dict__", ()) or isinstance(
        inspect.getattr_static(type(one), "epoch", None), property | MemberDescriptorType
    )
    value = None
    if of_itself:
        with suppress_own():
            value = one.epoch
    return _whole(value)


def _whole(value: Any) -> int | None:
    """The number of an epoch, of any type; None for anything else."""
    with suppress_own():
        if not isinstance(value, bool) and (number := int(value)) == value and number >= 0:
            return number
    return None
