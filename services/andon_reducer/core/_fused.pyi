from typing_extensions import Buffer

def weighted_mean(
    out: Buffer, vectors: tuple[Buffer, ...], shares: tuple[float, ...], past_caches: bool, /
) -> bool: ...
