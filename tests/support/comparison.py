"""Whether two batches are the same, as far as a user can tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch


def outcome(make, *args):
    """The result of ``make``, or the type of its exception."""
    try:
        return make(*args)
    except Exception as error:
        return type(error)


def difference(ours, theirs, where="batch"):
    """A description of the first difference in type, dtype, shape, layout, gradient or value; None if there is none.

    A list of strings may stand where ``default_collate`` has a tuple: test_strings_in_a_tuple_are_a_tuple.
    """
    if type(ours) is list and type(theirs) is tuple and isinstance(theirs[0], str | bytes):
        theirs = list(theirs)
    if type(ours) is not type(theirs):
        return f"{where} is {ours!r:.200} and not {theirs!r:.200}"
    if isinstance(theirs, torch.Tensor):
        for what in ("dtype", "shape", "layout", "requires_grad", "is_quantized"):
            if getattr(ours, what) != getattr(theirs, what):
                return f"{where}.{what} is {getattr(ours, what)} and not {getattr(theirs, what)}"
        if theirs.layout is not torch.strided:
            ours, theirs = ours.detach().to_dense(), theirs.detach().to_dense()
        one, two = (plain_bits(each) for each in (ours, theirs))
        return None if torch.equal(one, two) else f"{where} is {ours} and not {theirs}"
    if isinstance(theirs, np.ndarray):
        return None if ours.dtype == theirs.dtype and np.array_equal(ours, theirs) else f"{where} differs"
    if dataclasses.is_dataclass(theirs) and not isinstance(theirs, type):
        ours, theirs = vars_of(ours), vars_of(theirs)
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return f"{where} has the keys {list(ours)} and not {list(theirs)}"
        return next(
            (found for key in theirs if (found := difference(ours[key], theirs[key], f"{where}[{key!r}]"))), None
        )
    if isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return f"{where} has {len(ours)} parts and not {len(theirs)}"
        return next(
            (
                found
                for n, pair in enumerate(zip(ours, theirs, strict=True))
                if (found := difference(*pair, f"{where}[{n}]"))
            ),
            None,
        )
    return None if ours == theirs else f"{where} is {ours!r} and not {theirs!r}"


def plain_bits(tensor):
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)


def vars_of(record):
    return {one.name: getattr(record, one.name) for one in dataclasses.fields(record)}
