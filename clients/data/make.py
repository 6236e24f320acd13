"""Writes samples.csv: what the examples in all languages learn from.

    python3 clients/data/make.py > clients/data/samples.csv

Integers only, from a fixed generator, so that every language reads the same numbers: eight features
in sixteenths (-32 to 31), a group (0 to 4), and a label (0 or 1).
"""

import sys

SAMPLES, FEATURES, GROUPS = 257, 8, 5
SLOPES = (3, -2, 5, 0, -4, 1, 2, -1)
LEVELS = (40, -25, 0, 10, -60)
MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    """One output of the generator; see docs/protocol-data.md, The order."""
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def sample(index: int) -> list[int]:
    """Features, group and label of one sample; the label is noisy."""
    draw = splitmix64(index)
    features = [(draw >> (6 * place)) % 64 - 32 for place in range(FEATURES)]
    group = splitmix64(draw) % GROUPS
    noise = splitmix64(draw + 1) % 160 - 80
    score = sum(s * x for s, x in zip(SLOPES, features, strict=True)) + LEVELS[group] + noise
    return [*features, group, int(score > 0)]


def main() -> None:
    """Writes every sample as one line."""
    for index in range(SAMPLES):
        sys.stdout.write(",".join(map(str, sample(index))) + "\n")


if __name__ == "__main__":
    main()
