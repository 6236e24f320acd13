// The order of an epoch's samples: docs/protocol-data.md, section 8. Numbers are BigInt, of 64
// bits.

const MASK = (1n << 64n) - 1n;
const GOLDEN = 0x9e3779b97f4a7c15n;

/** One output of the SplitMix64 generator. */
export function splitmix64(x) {
  let z = (x + GOLDEN) & MASK;
  z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return z ^ (z >> 31n);
}

/** The permutation of `size` samples for one seed and epoch. */
export class Order {
  constructor(seed, epoch, size) {
    this.size = size;
    this.width = 1n;
    while (1n << (2n * this.width) < size) this.width += 1n;
    this.mask = (1n << this.width) - 1n;
    const key = splitmix64((splitmix64(seed) + epoch) & MASK);
    this.keys = Array.from({ length: 8 }, (_, i) => splitmix64((key + BigInt(i) * GOLDEN) & MASK));
  }

  /** The index of the sample at a position. The position must be below the size. */
  at(position) {
    let x = position;
    do {
      let left = x >> this.width;
      let right = x & this.mask;
      for (const key of this.keys) {
        [left, right] = [right, left ^ (splitmix64(right ^ key) & this.mask)];
      }
      x = (left << this.width) | right;
    } while (x >= this.size);
    return x;
  }
}
