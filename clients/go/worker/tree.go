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

// sum adds up what is below a node; each addition is rounded to float32. `made` returns a node that is
// there, such as each grain, and whether it is.
func (n node) sum(made func(node) (contribution, bool)) contribution {
	if there, ok := made(n); ok {
		return there
	}
	left, right := n.children()
	total, more := left.sum(made), right.sum(made)
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

// divide makes the mean of a root, whose weights have a sum: a quotient, rounded to float32.
func divide(gradients [][]float32, totalWeight float64, grain uint32, count uint64) {
	divisor := float32(totalWeight / float64(grain))
	if count == 1 {
		divisor = 1
	}
	for _, numbers := range gradients {
		for i, number := range numbers {
			if totalWeight == 0 {
				numbers[i] = 0
			} else {
				numbers[i] = number / divisor
			}
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

// grainsIn returns how many grains the batch of an assignment has.
func grainsIn(work *pb.ShardAssignment, grain uint32) uint64 {
	size := uint64(grain)
	return (work.Batch.GetStop() - work.Batch.GetStart() + size - 1) / size
}

// grains returns the samples of each grain in a share, and of each that the assignment verifies.
func (w *Worker) grains(work *pb.ShardAssignment) (owned, verified map[uint64][]uint64, err error) {
	size, start, stop := uint64(w.config.Plan.Grain), work.Batch.GetStart(), work.Batch.GetStop()
	order := NewOrder(w.config.Plan.Seed, work.Epoch, w.datasetSize())
	owned, verified = map[uint64][]uint64{}, map[uint64][]uint64{}
	for _, run := range work.Positions {
		for position := run.Start; position < run.Stop; position++ {
			if position < start || position >= stop {
				return nil, nil, errors.New("assigned a position outside of the batch")
			}
			grain := (position - start) / size
			owned[grain] = append(owned[grain], order.At(position))
		}
	}
	whole := func(grain uint64) uint64 {
		if rest := stop - start - grain*size; rest < size {
			return rest
		}
		return size
	}
	for grain, samples := range owned {
		if uint64(len(samples)) != whole(grain) {
			return nil, nil, errors.New("assigned a part of a grain")
		}
	}
	for _, index := range work.Verifies {
		grain := uint64(index)
		if grain >= grainsIn(work, w.config.Plan.Grain) {
			return nil, nil, errors.New("the batch lacks a grain that is to be verified")
		}
		for i := uint64(0); i < whole(grain); i++ {
			verified[grain] = append(verified[grain], order.At(start+grain*size+i))
		}
	}
	return owned, verified, nil
}

// computeNodes computes each grain of a share by itself, and adds up its maximal nodes. In a verified
// round it does so with other workers' grains first; nothing of those is contributed or counted.
func (w *Worker) computeNodes(r *round) error {
	owned, verified, err := w.grains(r.work)
	if err != nil {
		return err
	}
	var own, others *[]*pb.Attestation
	if r.work.Attests {
		r.verification = newVerification(r.work, w.model, w.config.Blocks)
		own, others = &r.verification.own, &r.verification.others
	}
	theirs := w.nodes(r, verified, w.model.Gradient, others)
	r.contributions = w.nodes(r, owned, func(samples []uint64) ([][]float32, float64) {
		began := time.Now()
		gradients, lossSum := w.model.Gradient(samples)
		r.busy += time.Since(began)
		r.backwards++
		return gradients, lossSum
	}, own)
	if r.verification != nil {
		r.verification.keep(append(theirs, r.contributions...))
	}
	return nil
}

// nodes computes grains, and adds up their maximal nodes. All are attested, if `attested` is not nil.
func (w *Worker) nodes(r *round, grains map[uint64][]uint64, gradient func([]uint64) ([][]float32, float64),
	attested *[]*pb.Attestation) (sums []contribution) {
	size, count := w.config.Plan.Grain, grainsIn(r.work, w.config.Plan.Grain)
	attest := func(of node, gradients [][]float32, samples []uint64) {
		if attested != nil {
			*attested = append(*attested, r.verification.attestation(of, gradients, samples))
		}
	}
	for _, each := range (node{0, count}).cover(grains) {
		sum := each.sum(func(of node) (contribution, bool) {
			if of.stop-of.first > 1 {
				return contribution{}, false
			}
			samples := grains[of.first]
			gradients, lossSum := gradient(samples)
			scale(gradients, float64(len(samples)), size, count)
			mark(gradients, w.config.Blocks)
			attest(of, gradients, samples) // before an addition changes it
			return contribution{weight: float64(len(samples)), lossSum: lossSum, gradients: gradients}, true
		})
		if each.stop-each.first > 1 {
			attest(each, sum.gradients, nil)
		}
		sum.node = &pb.TreeNode{First: uint32(each.first), Grains: uint32(each.stop - each.first), BatchGrains: uint32(count), Grain: size}
		sums = append(sums, sum)
	}
	return sums
}
