"""`neutral_modes` are the modes of a new thread; afterwards the thread is back in its own."""

from __future__ import annotations

import contextlib
import importlib.util
import threading

import pytest
import torch
from torch_modes import MODES, Counting, seen

from penstock._memory import modes
from penstock._memory.modes import neutral_modes


def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(seen()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
def test_neutral_modes_are_those_of_a_new_thread_and_end(outer, inner):
    """Two modes at once, in either order. Seen to fail: autocast, the device or inference mode stayed on."""
    if (outer, inner) == ("device", "default device") and torch.__version__ < (2, 13):
        pytest.skip(
            "torch.set_default_device within torch.device ends with an AssertionError in torch 2.6; in 2.13 it does not"
        )
    with MODES[outer](), MODES[inner]():
        before = seen()
        with neutral_modes():
            assert seen() == in_a_thread()
        assert seen() == before
    assert seen() == in_a_thread()


def test_neutral_modes_end_by_an_error_too():
    with torch.device("meta"), torch.inference_mode(), contextlib.suppress(ValueError), neutral_modes():
        raise ValueError
    with torch.device("meta"), Counting() as counting, torch.inference_mode():
        before = counting.calls
        with contextlib.suppress(ValueError), neutral_modes():
            torch.ones(2)
            raise ValueError
        assert counting.calls == before
        assert torch.is_inference_mode_enabled()
        assert torch.ones(2).device.type == "meta"
    assert torch._C._len_torch_function_stack() == 0


def test_neutral_modes_leave_the_users_own_autocast_alone():
    """A mode that user code enters inside stays in effect."""
    one = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16), neutral_modes():
        assert (one @ one).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert (one @ one).dtype == torch.bfloat16


STACK = ["_len_torch_function_stack", "_pop_torch_function_stack", "_push_on_torch_function_stack"]


@pytest.mark.parametrize(
    "missing",
    [["_is_any_autocast_enabled"], *([name] for name in STACK), ["_is_any_autocast_enabled", *STACK]],
    ids=str,
)
def test_modes_where_torch_has_lost_a_private_function(missing, monkeypatch):
    """Seen to fail: importing the module raised ``ImportError``. Now it leaves every mode that torch's public functions
    can leave."""
    for name in missing:
        monkeypatch.delattr(torch._C, name)
    spec = importlib.util.spec_from_file_location("modes_of_another_torch", modes.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    for mode in (
        "inference",
        "no grad",
        "autocast",
        *(["device", "function mode"] if not set(STACK) & set(missing) else []),
    ):
        with MODES[mode]():
            before = seen()
            with module.neutral_modes():
                assert seen() == in_a_thread()
            assert seen() == before
    with torch.device("meta"), module.neutral_modes():
        assert torch.ones(2).device.type in ("meta", "cpu")
    assert seen() == in_a_thread()
