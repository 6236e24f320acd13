package worker

import (
	"fmt"
	"math"

	pb "andon/v1"
)

// Verification: in some rounds a worker computes grains of others as well, and says what it has made.
// docs/protocol-same-bits.md, section 37.
//
// It attests hashes of each grain and each node, of its own and of what it verifies. It also makes the
// mean of all sums by itself: of those that it has, and of those that their owners send to all.

const verifies = "verifies.v1"

// maxHashedSamples is how many positions a batch may have in which each sample has a hash of its own.
const maxHashedSamples = 32768

// A verification is what a worker attests of one round.
type verification struct {
	work      *pb.ShardAssignment
	model     Model
	blocks    []*pb.Block
	own       []*pb.Attestation // of what it contributes
	others    []*pb.Attestation // of what it verifies
	sums      map[node][][]float32
	relayed   []*pb.NodeOwner // each has an exchange of its own, after that of the gradients
	digests   [][]byte        // of those that came
	meanCheck *pb.MeanCheck
}

func newVerification(work *pb.ShardAssignment, model Model, blocks []*pb.Block) *verification {
	v := &verification{work: work, model: model, blocks: blocks, sums: map[node][][]float32{}}
	for _, each := range work.Sums {
		if each.Relayed {
			v.relayed = append(v.relayed, each)
		}
	}
	return v
}

func nodeOf(of *pb.NodeOwner) node {
	return node{uint64(of.First), uint64(of.First) + uint64(of.Grains)}
}

// attestation is what this worker says of a sum. `samples` are those of a single grain.
func (v *verification) attestation(of node, gradients [][]float32, samples []uint64) *pb.Attestation {
	hashes := componentHashes(gradients, v.blocks)
	attested := &pb.Attestation{First: uint32(of.first), Grains: uint32(of.stop - of.first), Digest: hash128(hashes)}
	if of.stop-of.first > 1 {
		return attested
	}
	for _, index := range samples {
		attested.Samples = append(attested.Samples, hash64(v.model.Sample(index))...)
	}
	if v.work.Batch.GetStop()-v.work.Batch.GetStart() > maxHashedSamples {
		attested.Samples = hash64(attested.Samples)
	}
	for _, grain := range v.work.Verifies {
		if v.work.Itemised && grain == attested.First {
			attested.Components = hashes
		}
	}
	return attested
}

// keep keeps the nodes that this worker has made, if it is to make the mean.
func (v *verification) keep(nodes []contribution) {
	if len(v.work.Sums) == 0 {
		return
	}
	for _, each := range nodes {
		first := uint64(each.node.First)
		v.sums[node{first, first + uint64(each.node.Grains)}] = each.gradients
	}
}

// take takes a relayed node.
func (v *verification) take(of *pb.NodeOwner, gradients [][]float32) {
	v.digests = append(v.digests, hash128(componentHashes(gradients, v.blocks)))
	v.sums[nodeOf(of)] = gradients
}

// compare compares the averages with the mean of all sums. The error is that the sums that were
// assigned do not make up the batch.
func (v *verification) compare(averages [][]float32, totalWeight float64, grain uint32) error {
	if len(v.work.Sums) == 0 {
		return nil
	}
	count := grainsIn(v.work, grain)
	var missing error
	mean := (node{0, count}).sum(func(of node) (contribution, bool) {
		there, known := v.sums[of]
		if !known && of.stop-of.first == 1 {
			missing = fmt.Errorf("nobody has a sum of grain %d", of.first)
			return contribution{}, true
		}
		return contribution{gradients: copied(there)}, known
	}).gradients
	if missing != nil {
		return missing
	}
	divide(mean, totalWeight, grain, count)
	v.meanCheck = &pb.MeanCheck{Expected: blockDigest(mean), Came: blockDigest(averages),
		Relayed: v.digests, Apart: apart(mean, averages)}
	return nil
}

// report fills in what StepReady says of a verified round.
func (v *verification) report(ready *pb.StepReady, averages [][]float32) {
	ready.Attested = append(v.own, v.others...)
	ready.AveragesDigest = hash128(componentHashes(averages, v.blocks))
	ready.MeanCheck = v.meanCheck
}

// componentHashes are the hashes of a sum's components, one behind another. A component that is
// absent, and begins with -0.0, has the hash of no bytes.
func componentHashes(gradients [][]float32, blocks []*pb.Block) []byte {
	var hashes []byte
	for index, block := range blocks {
		rest := gradients[index]
		for _, component := range block.Components {
			numbers := rest[:Elements(component.Shape)]
			rest = rest[len(numbers):]
			if len(numbers) > 0 && numbers[0] == 0 && math.Signbit(float64(numbers[0])) {
				numbers = nil
			}
			hashes = append(hashes, hash128(Floats(numbers))...)
		}
	}
	return hashes
}

func blockDigest(blocks [][]float32) []byte {
	var hashes []byte
	for _, numbers := range blocks {
		hashes = append(hashes, hash128(Floats(numbers))...)
	}
	return hash128(hashes)
}

// apart is the first element whose bits differ, or nil.
func apart(expected, came [][]float32) *pb.ElementApart {
	for block, numbers := range expected {
		for element, number := range numbers {
			if other := came[block][element]; math.Float32bits(number) != math.Float32bits(other) {
				return &pb.ElementApart{Block: uint32(block), Element: uint64(element), Expected: number, Came: other}
			}
		}
	}
	return nil
}

func copied(blocks [][]float32) [][]float32 {
	var copies [][]float32
	for _, numbers := range blocks {
		copies = append(copies, append([]float32(nil), numbers...))
	}
	return copies
}
