"""Which sequence comes when, and who takes it: pure functions of (seed, position), without state.

All sequences of a run stand in one endless line: a new permutation for each epoch, one after the other. A step takes
the next ``global_batch_size`` places of the line, whatever the number of ranks; ranks then share those places. So a run
that goes on with other ranks at step n sees what the first one would have seen.

**Permutation.** A Feistel network over a x b >= n cells, whose round function is a keyed hash (BLAKE2b, the same on
every machine and with every library version); results outside of the n sequences are sent through again, which ends
since the network is a bijection. It costs no memory, and only the places that a rank asks for are computed.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

__all__ = ["deal", "deal_by_length", "permuted", "place"]

_ROUNDS = 6


def permuted(position: int, *, num: int, key: str) -> int:
    """Where the permutation of ``range(num)`` that ``key`` names sends ``position``."""
    assert 0 <= position < num
    if num == 1:
        return 0
    # Every key has its own function. 64 bytes is the longest key that BLAKE2b takes, so it is hashed first.
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    rows = math.isqrt(num - 1) + 1
    columns = -(-num // rows)
    while True:
        row, column = divmod(position, columns)
        for number in range(_ROUNDS):
            if number % 2:
                column = (column + _random(digest, number, row)) % columns
            else:
                row = (row + _random(digest, number, column)) % rows
        position = row * columns + column
        if position < num:
            return position


def _random(key: bytes, number: int, value: int) -> int:
    """64 bits; taking them modulo anything below 2**32 is off from uniform by less than 2**-32."""
    hashed = hashlib.blake2b(value.to_bytes(8, "little") + bytes([number]), key=key, digest_size=8)
    return int.from_bytes(hashed.digest(), "little")


def place(position: int, *, num: int, seed: int) -> int:
    """The sequence (below ``num``) at ``position`` of the endless line: each once in every ``num`` places."""
    epoch, within = divmod(position, num)
    return permuted(within, num=num, key=f"dsv4_fsdp order: seed {seed}, epoch {epoch}, of {num}")


def deal(num: int, *, rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """Which of a step's ``num`` places are ``rank``'s: a list of places for each forward.

    ``num`` is a multiple of ``world_size * micro_batch_size``. At each forward the ranks hold neighbouring places.
    """
    at_once = world_size * micro_batch_size
    starts = range(rank * micro_batch_size, num, at_once)
    return [list(range(start, start + micro_batch_size)) for start in starts]


def deal_by_length(
    places: Sequence[int], *, length_of: Callable[[int], int], rank: int, world_size: int, micro_batch_size: int
) -> list[list[int]]:
    """The same, but with the longest first, so that what all ranks do at one time has nearly one length.

    FSDP's ranks wait for each other in each layer of each forward: what counts is that the micro-batches of one forward
    are alike, not that a rank's tokens add up to the others'. Places of equal length keep their order.

    Args:
        places: all sequences of the step.
        length_of: a sequence -> its tokens.

    Returns:
        This rank's sequences for each forward.
    """
    ordered = sorted(places, key=lambda sequence: -length_of(sequence))
    dealt = deal(len(places), rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
    return [[ordered[place] for place in micro_batch] for micro_batch in dealt]
