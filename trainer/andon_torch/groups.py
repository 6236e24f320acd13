"""Makes process groups, as PyTorch asks for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from andon_torch.process_group import AndonProcessGroup
from andon_torch.session import NewGroup, group_of

__all__ = ["create"]


def create(options: Any, backend_options: Any) -> AndonProcessGroup:
    """A group for what `Backend.register_backend(extended_api=True)` says of it.

    Args:
        options: PyTorch's `_DistributedBackendOptions`.
        backend_options: the script's `pg_options`; there are none.

    Raises:
        NotImplementedError: there are `pg_options`.
    """
    if backend_options is not None:
        raise NotImplementedError(
            f"the backend andon has no options, and got {type(backend_options).__name__}: leave "
            "pg_options out"
        )
    # The default group's list is empty: it has all ranks.
    listed = tuple(options.global_ranks_in_group)
    return group_of(
        NewGroup(
            name=options.group_id,
            rank=options.group_rank,
            ranks=listed or tuple(range(options.group_size)),
            whole=not listed or len(listed) == dist.get_world_size(),
            timeout=options.timeout,
            store=options.store,
        )
    )
