package worker

import "math/bits"

const golden = 0x9E3779B97F4A7C15

// SplitMix64 returns one output of the generator that docs/protocol-data.md, section 8 defines.
func SplitMix64(x uint64) uint64 {
	z := x + golden
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return z ^ (z >> 31)
}

// Order is the permutation of an epoch's samples.
type Order struct {
	size, mask uint64
	width      uint
	keys       [8]uint64
}

// NewOrder returns the order of size samples (1 to 2^63) for one seed and epoch.
func NewOrder(seed, epoch, size uint64) *Order {
	width := uint(bits.Len64(size-1)+1) / 2
	if width == 0 {
		width = 1
	}
	order := &Order{size: size, width: width, mask: 1<<width - 1}
	key := SplitMix64(SplitMix64(seed) + epoch)
	for i := range order.keys {
		order.keys[i] = SplitMix64(key + uint64(i)*golden)
	}
	return order
}

// At returns the index of the sample at a position. The position must be below the size.
func (o *Order) At(position uint64) uint64 {
	for x := position; ; {
		left, right := x>>o.width, x&o.mask
		for _, key := range o.keys {
			left, right = right, left^(SplitMix64(right^key)&o.mask)
		}
		if x = left<<o.width | right; x < o.size {
			return x
		}
	}
}
