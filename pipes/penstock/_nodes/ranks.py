"""Ranks: this process's share of a sequence, either given or looked up until a reader begins."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch.distributed

from penstock._arguments import whole_number
from penstock._errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh


@final
class Ranks:
    """The rank and the world size of a `Sharder`.

    Args:
        rank: From 0. None: look both up in ``mesh``, else in ``torch.distributed``, else in the environment variables
            ``RANK`` and ``WORLD_SIZE``, else rank 0 of 1.
        world_size: At least 1.
        mesh: One dimension of a ``DeviceMesh``.

    Attributes:
        pinned: The rank and world size in use until the next `pin`; None before the first one.

    Raises:
        ValueError: The arguments are inconsistent.
    """

    def __init__(self, rank: int | None, world_size: int | None, mesh: DeviceMesh | None) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(
                f"rank={rank!r} and world_size={world_size!r} go together: pass both, or neither to have them looked "
                f"up."
            )
        if mesh is not None and rank is not None:
            raise ValueError(
                f"mesh and rank={rank!r} exclude each other, because the mesh gives the rank. Drop one of them."
            )
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions, but the ranks share data along only one. Pass that one, such as "
                f"mesh['dp']."
            )
        if rank is not None and world_size is not None:
            rank, world_size = _checked(rank, world_size, "the arguments")
        self._given = None if rank is None or world_size is None else (rank, world_size)
        self._mesh = mesh
        self._group_of_mesh = None if mesh is None else process_group()
        self.pinned: tuple[int, int] | None = None
        self._anew = False  # the next `pin` looks them up again

    def pin(self) -> tuple[int, int]:
        """Fix rank and world size from now on."""
        self.pinned, self._anew = self.now(), False
        return self.pinned

    def forget(self) -> None:
        """Make the next `pin` look them up again, because the process group may have been recreated.

        Changes nothing by itself.
        """
        self._anew = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context there is one rank, for counting. Nothing may be read."""
        saved = self.pinned, self._anew
        self.pinned, self._anew = (0, 1), False
        try:
            yield
        finally:
            self.pinned, self._anew = saved

    def now(self) -> tuple[int, int]:
        """The pinned rank and world size, or those that `pin` would find now."""
        if self.pinned is not None and not self._anew:
            return self.pinned
        if self._given is not None:
            return self._given
        group = process_group()
        if self._mesh is not None:
            if self._mesh.get_coordinate() is None:
                raise ValueError(
                    f"mesh has the ranks {self._mesh.mesh.tolist()!s:.80}, but this is rank {group and group[0]}, "
                    f"which is not in it and so has no share. Iterate only on the ranks of the mesh, or include all "
                    f"ranks that read data in the mesh."
                )
            return self._mesh.get_local_rank(), self._mesh.size()
        if group is not None:
            return group
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return 0, 1
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except ValueError:
            came = f"RANK={os.environ['RANK']!r} and WORLD_SIZE={os.environ['WORLD_SIZE']!r}"
            raise ValueError(
                f"{came} in the environment must be whole numbers. Set both, or neither, or pass rank and world_size."
            ) from None
        return _checked(rank, world_size, "the environment")

    @property
    def is_given(self) -> bool:
        """Whether the numbers were passed as arguments."""
        return self._given is not None

    def members(self) -> Sequence[int]:
        """The ranks that read the same sequence: all of the process group, or of the mesh of which ``mesh`` is a
        dimension, whatever they get of it. Empty if the numbers do not come from a process group.
        """
        group = process_group()
        if self._given is not None or group is None:
            return ()
        if self._mesh is None:
            return range(group[1])
        ranks: list[int] = _whole(self._mesh).mesh.flatten().tolist()
        return ranks

    def check_group(self) -> None:
        """Refuse to deliver items that were dealt for a rank or world size other than those of the process group.

        The delivering thread calls this before each delivery. It is not called when items are read, because items in
        flight were read before the group was recreated, and a reader thread might find no group in between. Costs 2 us.

        Raises:
            GraphError: The process group was created or recreated with other numbers than this loader, or its ``mesh``,
                began with.
        """
        if self._given is not None:
            return
        began, group = self.pinned if self._mesh is None else self._group_of_mesh, process_group()
        if group is None or began is None or group == began:
            return
        remedy = (
            "pass the same state to loader.load_state_dict on every rank, which takes the new rank"
            if self._mesh is None
            else "build another loader, with a mesh of the new group, and load the same state on every rank"
        )
        raise GraphError(
            f"this loader began as rank {began[0]} of {began[1]}, but torch.distributed now says rank {group[0]} of "
            f"{group[1]}. Call init_process_group before the first batch, or pass rank and world_size. If the process "
            f"group was recreated: {remedy}."
        )


def _whole(mesh: Any) -> DeviceMesh:
    """The mesh of which ``mesh`` is a part."""
    whole: DeviceMesh
    if hasattr(mesh, "_get_root_mesh"):
        whole = mesh._get_root_mesh()
    else:  # an older torch
        from torch.distributed.device_mesh import _mesh_resources

        whole = _mesh_resources.get_root_mesh(mesh)
    return whole


_AVAILABLE = torch.distributed.is_available()


def process_group() -> tuple[int, int] | None:
    """The rank and the world size according to ``torch.distributed``; None if there is no process group."""
    if _AVAILABLE and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def _checked(rank: int, world_size: int, where: str) -> tuple[int, int]:
    rank, world_size = whole_number("rank", rank, 0), whole_number("world_size", world_size, 1)
    if rank >= world_size:
        raise ValueError(
            f"rank={rank} and world_size={world_size} from {where} do not fit: the rank must be below the world size."
        )
    return rank, world_size
