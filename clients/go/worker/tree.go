package worker

import (
	"errors"
	"time"

	pb "andon/v1"
)

// Grains, and the tree along which they are added: docs/protocol-same-bits.md, sections 31 to 34.
//
// A grain's gradient has the same bits whoever computes it, and the tree depends on the number of
// grains alone. So the mean has the same bits whatever shares the workers have.

const (
	sameBits    = "same-bits.v1"
	treeVersion = 1
)

// A node is the grains [first, stop) of a batch.
type node struct{ first, stop uint64 }

// children returns the nodes below a node of several grains. The left one has the greatest power of
// two of grains that is less than all of them.
func (n node) children() (node, node) {
	size := uint64(1)
	for 2*size < n.stop-n.first {
		size *= 2
	}
	return node{n.first, n.first + size}, node{n.first + size, n.stop}
}

// cover returns the greatest nodes in n whose grains all have samples, in rising order.
func (n node) cover(owned map[uint64][]uint64) []node {
	if len(owned) == 0 {
		return nil
	}
	whole := true
	for grain := n.first; whole && grain < n.stop; grain++ {
		whole = owned[grain] != nil
	}
	if whole {
		return []node{n}
	}
	if n.stop-n.first == 1 {
		return nil
	}
	left, right := n.children()
	return append(left.cover(owned), right.cover(owned)...)
}

// A contribution is what a worker contributes as one: the mean over its samples, or the sum of a node.
type contribution struct {
	node            *pb.TreeNode // nil if the plan has no grain
	weight, lossSum float64
	gradients       [][]float32
}

// sum adds up the leaves of a node; each addition is rounded to float32.
func (n node) sum(leaf func(grain uint64) contribution) contribution {
	if n.stop-n.first == 1 {
		return leaf(n.first)
	}
	left, right := n.children()
	total, more := left.sum(leaf), right.sum(leaf)
	total.weight += more.weight
	total.lossSum += more.lossSum
	for block, numbers := range more.gradients {
		for i, number := range numbers {
			total.gradients[block][i] += number
		}
	}
	return total
}

// scale makes a leaf of a grain's mean gradient: a product, rounded to float32.
func scale(gradients [][]float32, weight float64, grain uint32, count uint64) {
	factor := float32(weight / float64(grain))
	if count == 1 {
		factor = 1
	}
	for _, numbers := range gradients {
		for i, number := range numbers {
			numbers[i] = float32(factor * number)
		}
	}
}

// mark adds 0.0 to the first element of each component: -0.0 there would mean that it is absent.
func mark(gradients [][]float32, blocks []*pb.Block) {
	for index, block := range blocks {
		at := uint64(0)
		for _, component := range block.Components {
			if size := Elements(component.Shape); size > 0 {
				gradients[index][at] += 0
				at += size
			}
		}
	}
}

// grains returns the samples of each grain in a share, and how many grains the batch has.
func (w *Worker) grains(work *pb.ShardAssignment) (map[uint64][]uint64, uint64, error) {
	size, start, stop := uint64(w.config.Plan.Grain), work.Batch.GetStart(), work.Batch.GetStop()
	order := NewOrder(w.config.Plan.Seed, work.Epoch, w.datasetSize())
	owned := map[uint64][]uint64{}
	for _, run := range work.Positions {
		for position := run.Start; position < run.Stop; position++ {
			if position < start || position >= stop {
				return nil, 0, errors.New("assigned a position outside of the batch")
			}
			grain := (position - start) / size
			owned[grain] = append(owned[grain], order.At(position))
		}
	}
	for grain, samples := range owned {
		whole := size
		if rest := stop - start - grain*size; rest < size {
			whole = rest
		}
		if uint64(len(samples)) != whole {
			return nil, 0, errors.New("assigned a part of a grain")
		}
	}
	return owned, (stop - start + size - 1) / size, nil
}

// computeNodes computes each grain of a share by itself, and adds up its maximal nodes.
func (w *Worker) computeNodes(r *round) error {
	owned, count, err := w.grains(r.work)
	if err != nil {
		return err
	}
	size := w.config.Plan.Grain
	leaf := func(grain uint64) contribution {
		began := time.Now()
		gradients, lossSum := w.model.Gradient(owned[grain])
		r.busy += time.Since(began)
		r.backwards++
		weight := float64(len(owned[grain]))
		scale(gradients, weight, size, count)
		mark(gradients, w.config.Blocks)
		return contribution{weight: weight, lossSum: lossSum, gradients: gradients}
	}
	for _, each := range (node{0, count}).cover(owned) {
		sum := each.sum(leaf)
		sum.node = &pb.TreeNode{First: uint32(each.first), Grains: uint32(each.stop - each.first), BatchGrains: uint32(count), Grain: size}
		r.contributions = append(r.contributions, sum)
	}
	return nil
}
