"""Damage of any kind to a file that was sound."""

import random
from collections.abc import Iterator

EXTREMES = (b"\0", b"\xff", b"\x7f", b"\0" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\xff" * 8)


def mutations(content: bytes, seed: int) -> Iterator[bytes]:
    """Endless damaged copies: bits, bytes, numbers and pieces changed, cut, copied and moved.

    Args:
        content: the sound file.
        seed: of the damage.
    """
    rng = random.Random(seed)
    while True:
        copy = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            start = rng.randrange(len(copy) + 1)
            stop = min(len(copy), start + rng.choice((1, 1, 2, 4, 8, 64, 512)))
            match rng.randrange(8):
                case 0 if start < len(copy):
                    copy[start] ^= 1 << rng.randrange(8)
                case 1:
                    copy[start:stop] = rng.randbytes(stop - start)
                case 2:
                    extreme = rng.choice(EXTREMES)
                    copy[start : start + len(extreme)] = extreme
                case 3:
                    del copy[start:stop]
                case 4:
                    copy[start:start] = rng.randbytes(rng.choice((1, 4, 64)))
                case 5:
                    copy[start:start] = copy[start:stop] * rng.choice((1, 2, 50))
                case 6:
                    place = rng.randrange(len(copy) + 1)
                    copy[place : place + stop - start] = copy[start:stop]
                case 7 if rng.random() < 0.3:
                    del copy[start:]
        yield bytes(copy)
