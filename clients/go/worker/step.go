package worker

import (
	"errors"
	"fmt"
	"math"
	"time"

	pb "andon/v1"
)

// One step on this worker: from the assignment to the record, or to the end of a void round.

// begin computes the gradients of the assigned share and sends them.
func (w *Worker) begin(work *pb.ShardAssignment) error {
	w.void("a new round was assigned")
	if keyOf(work.Parent) != keyOf(w.head) {
		return errors.New("assigned work for another head")
	}
	shares := work.Reducers
	if len(shares) == 0 {
		shares = w.welcome.Reducers
	}
	chunks, err := cut(w.config.Blocks, uint64(w.welcome.Policy.ChunkElements), shares)
	r := newRound(work, chunks, w.config.Blocks)
	w.round = r
	w.see(work.Key.Term)
	if err != nil {
		w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: err.Error()})
		return nil
	}
	for _, run := range work.Positions {
		r.samples += run.Stop - run.Start
	}
	if w.config.Plan.Grain == 0 {
		w.computeMean(r)
	} else if err := w.computeNodes(r); err != nil {
		w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: err.Error()})
		return nil
	}
	for _, each := range r.contributions {
		if bad := w.check(each.gradients, each.lossSum); bad != nil {
			w.fault(bad.Kind, bad)
			return nil
		}
	}
	r.outgoing = r.contributions
	w.contribute()
	return nil
}

// contribute sends what the round contributes to its present exchange.
func (w *Worker) contribute() {
	if err := w.exchange.send(w.round); err != nil {
		w.fault(pb.FaultKind_FAULT_KIND_DATA_STREAM_LOST, &pb.Fault{Message: err.Error()})
	}
}

// goOn makes the next exchange after one that is over, or reports that there is none left.
func (w *Worker) goOn() {
	if follows, err := w.round.next(w.config.Blocks, w.config.Plan.Grain); err != nil {
		w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: err.Error()})
	} else if follows {
		w.contribute()
	} else {
		w.ready()
	}
}

// computeMean computes a share's gradient as one, and limits its norm.
func (w *Worker) computeMean(r *round) {
	if r.samples == 0 {
		return
	}
	order := NewOrder(w.config.Plan.Seed, r.work.Epoch, w.datasetSize())
	var samples []uint64
	for _, run := range r.work.Positions {
		for position := run.Start; position < run.Stop; position++ {
			samples = append(samples, order.At(position))
		}
	}
	began := time.Now()
	gradients, lossSum := w.model.Gradient(samples)
	r.busy, r.backwards = time.Since(began), 1
	r.ownNorm = norm(gradients)
	limit(gradients, r.ownNorm, w.welcome.Policy.MaxGradNorm)
	r.contributions = []contribution{{weight: float64(r.samples), lossSum: lossSum, gradients: gradients}}
}

func (w *Worker) datasetSize() uint64 {
	return w.config.Plan.XDatasetSize.(*pb.RunPlan_DatasetSize).DatasetSize
}

// check finds a loss or a gradient that is not finite. It runs before encoding: such values must not
// be sent.
func (w *Worker) check(gradients [][]float32, lossSum float64) *pb.Fault {
	rank := &pb.Fault_Rank{Rank: w.round.work.Rank}
	if math.IsNaN(lossSum) || math.IsInf(lossSum, 0) {
		text := fmt.Sprint(lossSum)
		return &pb.Fault{Kind: pb.FaultKind_FAULT_KIND_NON_FINITE_LOSS, XRank: rank, Value: text, Message: "the loss is " + text}
	}
	for block, numbers := range gradients {
		for element, number := range numbers {
			if math.IsNaN(float64(number)) || math.IsInf(float64(number), 0) {
				return &pb.Fault{Kind: pb.FaultKind_FAULT_KIND_NON_FINITE_GRADIENT, XRank: rank,
					XBlock: &pb.Fault_Block{Block: uint32(block)}, Element: uint64(element),
					Value: fmt.Sprint(number), Message: "the gradient is not finite"}
			}
		}
	}
	return nil
}

// fault reports a fault of the current round; the coordinator then voids the round.
func (w *Worker) fault(kind pb.FaultKind, fault *pb.Fault) {
	fault.Key, fault.Kind = w.round.work.Key, kind
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_Fault{Fault: fault}})
}

// lose replaces the streams to the reducers. The current round can't complete on this worker.
func (w *Worker) lose(why error) {
	if w.round != nil && !w.round.held {
		w.fault(pb.FaultKind_FAULT_KIND_DATA_STREAM_LOST, &pb.Fault{Message: why.Error()})
	}
	w.reopen()
}

var faultKinds = map[pb.BlockFaultKind]pb.FaultKind{
	pb.BlockFaultKind_BLOCK_FAULT_KIND_NON_FINITE:         pb.FaultKind_FAULT_KIND_NON_FINITE_GRADIENT,
	pb.BlockFaultKind_BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: pb.FaultKind_FAULT_KIND_NON_FINITE_AVERAGE,
	pb.BlockFaultKind_BLOCK_FAULT_KIND_ENCODING_OVERFLOW:  pb.FaultKind_FAULT_KIND_ENCODING_OVERFLOW,
}

// corruptChunk reports a chunk that was changed on its way from or to a rank.
func (w *Worker) corruptChunk(rank, block uint32, element uint64, message string) {
	w.fault(pb.FaultKind_FAULT_KIND_CORRUPT_CHUNK, &pb.Fault{XRank: &pb.Fault_Rank{Rank: rank},
		XBlock: &pb.Fault_Block{Block: block}, Element: element, Message: message})
}

// average handles a reducer's answer for the current round, and forwards its faults.
func (w *Worker) average(one event) {
	lost := one.lost
	if lost == nil { // a round that can't be followed must not be committed
		lost = answerError(one.bulk)
	}
	if lost != nil {
		w.lose(lost)
		return
	}
	if w.round == nil || w.round.held {
		return
	}
	switch it := one.bulk.Message.(type) {
	case *pb.ReduceResponse_RoundOpened:
		if most, largest := uint64(it.RoundOpened.MaxPayloadBytes), 4*w.round.largest(); most > 0 && most < largest {
			text := fmt.Sprintf("a reducer takes payloads of %d bytes, and chunks have %d", most, largest)
			w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: text})
		} else if needs := w.needs(); needs != "" && !has(it.RoundOpened.Capabilities, needs) {
			does := "can't add gradients along the tree of grains"
			if needs == trimmed {
				does = "makes no trimmed means"
			}
			text := fmt.Sprintf("a reducer lacks %s, so it %s: update it", needs, does)
			w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: text})
		}
	case *pb.ReduceResponse_AveragedBlock:
		if !w.present(it.AveragedBlock.Key) {
			return
		}
		if one.corrupt {
			w.corruptChunk(w.round.work.Rank, it.AveragedBlock.Block, it.AveragedBlock.ElementOffset,
				"an average does not match its CRC-32C: it was changed on its way to this worker")
			return
		}
		if err := w.round.take(it.AveragedBlock); err != nil {
			w.lose(err)
		} else if w.round.complete() {
			w.goOn()
		}
	case *pb.ReduceResponse_BlockFault:
		if found := it.BlockFault; w.present(found.Key) {
			kind, known := faultKinds[found.Kind]
			if !known {
				kind = pb.FaultKind_FAULT_KIND_PROTOCOL
			}
			fault := &pb.Fault{XBlock: &pb.Fault_Block{Block: found.Block}, Element: found.Element, Value: found.Value, Message: found.Message}
			if rank, ok := found.XRank.(*pb.BlockFault_Rank); ok {
				fault.XRank = &pb.Fault_Rank{Rank: rank.Rank}
			}
			w.fault(kind, fault)
		}
	case *pb.ReduceResponse_StaleRound:
		if w.present(it.StaleRound.Key) {
			w.see(it.StaleRound.Greatest.GetTerm())
			w.fault(pb.FaultKind_FAULT_KIND_STALE_ROUND, &pb.Fault{Message: "the reducer saw a greater key", Greatest: it.StaleRound.Greatest})
		}
	case *pb.ReduceResponse_RoundAborted:
		if !w.present(it.RoundAborted.Key) {
			return
		}
		if found := it.RoundAborted.Corrupt; found != nil {
			w.corruptChunk(found.Rank, found.Block, found.Element, it.RoundAborted.Message)
		} else {
			w.fault(pb.FaultKind_FAULT_KIND_DATA_STREAM_LOST, &pb.Fault{Message: it.RoundAborted.Message})
		}
	}
}

// ready reports that all averages have arrived. The weights have not moved yet.
func (w *Worker) ready() {
	r := w.round
	r.held = true
	report := &pb.StepReady{Key: r.work.Key, Samples: r.samples, TotalWeight: r.total,
		WorldSize: r.work.WorldSize, Timings: r.timings()}
	for _, each := range r.contributions {
		report.Weight += each.weight
		report.LossSum += each.lossSum
		if each.node != nil {
			report.NodeLosses = append(report.NodeLosses, &pb.NodeLoss{First: each.node.First,
				Grains: each.node.Grains, Weight: each.weight, LossSum: each.lossSum})
		}
	}
	if r.verification != nil {
		r.verification.report(report, r.averages)
	}
	if every := uint64(w.welcome.Policy.DigestEvery); r.work.WantsDigest || every > 0 && w.Step%every == 0 {
		report.Digest = w.digest()
	}
	if w.welcome.Policy.GradientNorm {
		report.XGradientNorm = &pb.StepReady_GradientNorm{GradientNorm: norm(r.averages)}
	}
	if w.welcome.Policy.OwnGradientNorm && r.samples > 0 {
		report.XOwnGradientNorm = &pb.StepReady_OwnGradientNorm{OwnGradientNorm: r.ownNorm}
	}
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_StepReady{StepReady: report}})
}

func (w *Worker) digest() *pb.WeightsDigest {
	return &pb.WeightsDigest{Head: w.head, Sha256: WeightsDigest(w.model.Parameters())}
}

// commit applies a record: only to its parent, and a STEP only if its averages are held (rule 7).
func (w *Worker) commit(message *pb.StepCommitted) error {
	record := message.Record
	step := record.Kind == pb.RecordKind_RECORD_KIND_STEP
	follows := w.head != nil && keyOf(record.Parent) == keyOf(w.head)
	if record.Kind == pb.RecordKind_RECORD_KIND_INITIAL {
		follows = w.head == nil && len(record.Roster) == 1 && record.Roster[0] == w.welcome.Worker
	}
	held := w.present(record.Key) && w.round.held
	if !follows || (step && !held) {
		if w.head != nil && keyOf(record.Key) == keyOf(w.head) {
			return nil
		}
		return errors.New("the record can't be applied to this worker's head")
	}
	if step {
		if w.round.total > 0 && !message.Overflow {
			w.model.Apply(w.round.averages)
		}
		w.Loss, w.round = message.Loss, nil
	}
	if record.Kind == pb.RecordKind_RECORD_KIND_INITIAL && w.state == nil {
		w.state = bootstrapState(w.model.Parameters(), w.config.Optimizers)
	}
	w.head, w.cursor, w.Step = record.Key, record.Cursor, record.Step
	if message.StopReason != "" {
		return w.leave(message.StopReason)
	}
	w.ask()
	return nil
}

// leave leaves the line, and reports the digest of the final weights.
func (w *Worker) leave(stop string) error {
	reason := pb.LeaveReason_LEAVE_REASON_COMPLETE
	if stop == "drained" {
		reason = pb.LeaveReason_LEAVE_REASON_DRAINED
	}
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_Leave{Leave: &pb.Leave{Reason: reason, FinalStep: w.Step, Digest: w.digest()}}})
	w.send(nil)
	patience := time.After(5 * time.Second)
	ended := make(chan struct{})
	go func() {
		for one := w.inbox.take(); one.lost == nil || one.from != nil; one = w.inbox.take() {
		}
		close(ended)
	}()
	select {
	case <-ended:
	case <-patience:
	}
	return errOver
}
