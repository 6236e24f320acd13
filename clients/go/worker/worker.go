// Package worker is one worker's place on an Andon line. It speaks docs/protocol.md.
//
// Theory of operation. One goroutine owns everything here and takes events from an inbox; the
// streams' goroutines only put events there. A session is one Train stream: it is never resumed,
// the worker joins again on a new one. The head moves by records and transfers alone (rule 7).
package worker

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"math"
	mathrand "math/rand"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "andon/v1"
)

// A Model is what a worker trains.
type Model interface {
	// Parameters are all weights, in the order of the state dict. They are changed in place.
	Parameters() []Tensor
	// Gradient is the mean over samples, one flat vector a block, and the sum of their losses.
	Gradient(samples []uint64) (gradients [][]float32, lossSum float64)
	// Apply moves the weights by the averages of a committed step.
	Apply(averages [][]float32)
}

// A Config says which line, and what the worker brings to it.
type Config struct {
	Address, RunID string
	Slot           *uint32 // what the launcher gave, if it did
	Token          []byte
	TLS            string // a folder; empty is plaintext
	Blocks         []*pb.Block
	Plan           *pb.RunPlan
	Optimizers     string // what a founder says of its optimizers; docs/protocol.md, section 11
}

// A Refused worker is not taken by the line: trying again is no use.
type Refused struct{ Message string }

func (r *Refused) Error() string { return "the line does not take this worker: " + r.Message }

// A Lost worker found no coordinator for as long as is worth waiting.
type Lost struct{ Message string }

func (l *Lost) Error() string { return "the line is lost: " + l.Message }

var errOver = errors.New("the run is over")

const firstPatience, longestWait = 300 * time.Second, 2 * time.Second

type key struct{ term, round uint64 }

func keyOf(k *pb.Key) key { return key{k.GetTerm(), k.GetRound()} }

// Worker is a place on a line. After Run, Step and Loss are of the last step.
type Worker struct {
	config Config
	model  Model

	Step uint64
	Loss float64

	incarnation, greatest uint64
	head                  *pb.Key
	cursor                *pb.Cursor
	state                 []byte // as it came, or as it was founded
	arrived               []byte // of a state that was cut off
	arrivedSum            []byte
	round                 *round
	halt                  *pb.HaltEvidence
	stop                  string

	welcome   *pb.JoinAccepted
	control   pb.Coordinator_TrainClient
	outgoing  chan *pb.TrainRequest
	ctx       context.Context // of the session
	inbox     *inbox
	exchange  *exchange
	asked     key
	askedOnce bool
}

// New makes a worker that has not joined yet.
func New(config Config, model Model) *Worker {
	var random [8]byte
	if _, err := rand.Read(random[:]); err != nil {
		panic(err)
	}
	return &Worker{config: config, model: model, incarnation: binary.LittleEndian.Uint64(random[:])}
}

// Run trains until the run is over: *Refused or *Lost if it is not.
func (w *Worker) Run(ctx context.Context) error {
	wait, began := 50*time.Millisecond, time.Now()
	for {
		joined, err := w.session(ctx)
		var refused *Refused
		var lost *Lost
		switch {
		case err == errOver:
			return nil
		case errors.As(err, &refused) || errors.As(err, &lost):
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if joined {
			wait, began = 50*time.Millisecond, time.Now()
			log.Printf("%v: joining again", err)
		}
		patience := firstPatience
		if w.welcome != nil {
			patience = seconds(w.welcome.Liveness.GetReconnectS())
		}
		if time.Since(began) > patience {
			return &Lost{fmt.Sprintf("nobody answered at %s for %v (%v)", w.config.Address, patience, err)}
		}
		time.Sleep(time.Duration(float64(wait) * (0.5 + mathrand.Float64())))
		if wait = wait * 3 / 2; wait > longestWait {
			wait = longestWait
		}
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// session joins, and works until the stream ends; whether it was taken, and why it ended.
func (w *Worker) session(outer context.Context) (bool, error) {
	ctx, cancel := context.WithCancel(outer)
	defer cancel()
	connection, err := Dial(w.config.Address, w.config.TLS)
	if err != nil {
		return false, &Refused{err.Error()}
	}
	defer connection.Close()
	w.control, err = pb.NewCoordinatorClient(connection).Train(ctx)
	if err != nil {
		return false, err
	}
	first := &pb.TrainRequest{Message: &pb.TrainRequest_Join{Join: w.join()}}
	if err := w.control.Send(first); err != nil {
		_, err = w.control.Recv() // which says why
		return false, w.refusal(err)
	}
	answer, err := w.control.Recv()
	if err != nil {
		return false, w.refusal(err)
	}
	welcome := answer.GetJoinAccepted()
	if welcome == nil {
		return false, &Refused{"the peer did not answer Join with JoinAccepted"}
	}
	w.welcome, w.ctx, w.inbox, w.askedOnce = welcome, ctx, newInbox(), false
	w.exchange = newExchange(ctx, w.inbox, w.openReducer)
	w.see(welcome.Term)
	encoding, answers := welcome.Policy.GetEncoding(), welcome.Policy.GetAnswerEncoding()
	if encoding > pb.Encoding_ENCODING_FLOAT32 || answers > pb.Encoding_ENCODING_FLOAT32 {
		return false, &Refused{"this client speaks FLOAT32: serve the line with --encoding float32"}
	}
	w.outgoing = make(chan *pb.TrainRequest, 64)
	go w.write(w.control, w.outgoing, ctx, seconds(welcome.Liveness.GetHeartbeatS()))
	go func(stream pb.Coordinator_TrainClient, box *inbox) {
		for {
			message, err := stream.Recv()
			if err != nil {
				cancel() // a transfer must not outlive the stream
			}
			box.put(event{control: message, lost: err})
			if err != nil {
				return
			}
		}
	}(w.control, w.inbox)
	w.halt = welcome.Halt
	inSync := welcome.Standing == pb.Standing_STANDING_IN_SYNC
	if inSync && keyOf(welcome.Head) != keyOf(w.head) {
		return true, &Lost{"the coordinator calls this worker in sync with a head that it does not have"}
	}
	if w.round != nil && (inSync || !w.round.held) {
		w.round = nil // void, or its record was not written
	}
	if inSync {
		w.ask()
	}
	for {
		one := w.inbox.take()
		switch {
		case one.control != nil:
			err = w.obey(one.control)
		case one.from != nil && one.from == w.exchange:
			w.average(one)
		case one.from == nil:
			err = fmt.Errorf("the coordinator was lost: %w", w.refusal(one.lost))
		}
		if err != nil {
			return true, err
		}
	}
}

func (w *Worker) join() *pb.Join {
	host, _ := os.Hostname()
	join := &pb.Join{
		RunId: w.config.RunID, NodeId: host, Incarnation: w.incarnation, Backend: "cpu", ProtocolVersion: 1,
		Devices: []*pb.Device{{Kind: "cpu", Name: "go"}},
		Layout:  &pb.Layout{Blocks: w.config.Blocks, Digest: LayoutDigest(w.config.Blocks)},
		Plan:    w.config.Plan, Head: w.head, Cursor: w.cursor, Step: w.Step,
		GreatestTerm: w.greatest, Halt: w.halt, Token: w.config.Token,
	}
	if slot := w.config.Slot; w.welcome != nil {
		join.XLaunchSlot = &pb.Join_LaunchSlot{LaunchSlot: w.welcome.Worker}
	} else if slot != nil {
		join.XLaunchSlot = &pb.Join_LaunchSlot{LaunchSlot: *slot}
	}
	if w.round != nil && w.round.held {
		join.HeldKey = w.round.work.Key
	}
	return join
}

// refusal tells an end that trying again does not change from one that it may.
func (w *Worker) refusal(err error) error {
	switch code := status.Code(err); code {
	case codes.FailedPrecondition, codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied:
		return &Refused{status.Convert(err).Message()}
	case codes.AlreadyExists:
		if w.welcome == nil { // else a dead process may stand in the way for a while
			return &Refused{status.Convert(err).Message()}
		}
	}
	return err
}

// write is the only one who writes to the stream. A session's end ends it.
func (w *Worker) write(stream pb.Coordinator_TrainClient, outgoing <-chan *pb.TrainRequest, ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for sequence := uint64(1); ; {
		message := &pb.TrainRequest{Message: &pb.TrainRequest_Heartbeat{Heartbeat: &pb.Heartbeat{Sequence: sequence}}}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			sequence++
		case message = <-outgoing:
		}
		if message == nil {
			_ = stream.CloseSend()
			return
		}
		if stream.Send(message) != nil {
			return // the reader says why
		}
	}
}

func (w *Worker) send(message *pb.TrainRequest) {
	select {
	case w.outgoing <- message:
	case <-w.ctx.Done():
	}
}

func (w *Worker) openReducer(ctx context.Context, address string) (*grpc.ClientConn, pb.Reducer_ReduceClient, error) {
	if address == "" {
		address = w.config.Address
	}
	connection, err := Dial(address, w.config.TLS)
	if err != nil {
		return nil, nil, err
	}
	stream, err := pb.NewReducerClient(connection).Reduce(ctx)
	if err == nil {
		err = stream.Send(&pb.ReduceRequest{Message: &pb.ReduceRequest_OpenRound{OpenRound: &pb.OpenRound{
			RunId: w.config.RunID, Worker: w.welcome.Worker, SessionToken: w.welcome.SessionToken}}})
	}
	if err != nil {
		connection.Close()
		return nil, nil, err
	}
	return connection, stream, nil
}

func (w *Worker) see(term uint64) {
	if term > w.greatest {
		w.greatest = term
	}
}

// ask asks for work, once a head and stream.
func (w *Worker) ask() {
	if w.head == nil || w.halt != nil || (w.askedOnce && w.asked == keyOf(w.head)) {
		return
	}
	w.asked, w.askedOnce = keyOf(w.head), true
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_RequestWork{RequestWork: &pb.RequestWork{Head: w.head}}})
}

// void gives the present round up: averages that are still to come are worth nothing.
func (w *Worker) void(why string) {
	if w.round == nil {
		return
	}
	log.Printf("step %d is tried again: %s", w.round.work.Step, why)
	if !w.round.held {
		w.exchange.cancel()
		w.exchange = newExchange(w.ctx, w.inbox, w.openReducer)
	}
	w.round = nil
}

func (w *Worker) present(k *pb.Key) bool {
	return w.round != nil && keyOf(w.round.work.Key) == keyOf(k)
}

// obey does what the coordinator says; an error ends the session.
func (w *Worker) obey(message *pb.TrainResponse) error {
	switch it := message.Message.(type) {
	case *pb.TrainResponse_ShardAssignment:
		return w.begin(it.ShardAssignment)
	case *pb.TrainResponse_StepCommitted:
		return w.commit(it.StepCommitted)
	case *pb.TrainResponse_RoundVoided:
		if w.present(it.RoundVoided.Key) {
			w.void(it.RoundVoided.Message)
		}
		w.ask()
	case *pb.TrainResponse_Halt:
		w.halt = it.Halt.Evidence
		w.void("the line halted")
		log.Printf("halted: %s. No weight moved.", w.halt.GetMessage())
	case *pb.TrainResponse_Resume:
		w.halt = nil
		log.Print("resumed")
		w.ask()
	case *pb.TrainResponse_StateTransfer:
		w.transfer(it.StateTransfer)
	case *pb.TrainResponse_Shutdown:
		if it.Shutdown.StopReason == "" {
			return &Lost{it.Shutdown.Message}
		}
		w.void("the run is over")
		return w.leave(it.Shutdown.StopReason)
	}
	return nil // what is not known is ignored
}

// begin computes a share and sends it.
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
	r := newRound(work, chunks)
	w.round = r
	w.see(work.Key.Term)
	if err != nil {
		w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: err.Error()})
		return nil
	}
	order := NewOrder(w.config.Plan.Seed, work.Epoch, w.datasetSize())
	var samples []uint64
	for _, run := range work.Positions {
		for position := run.Start; position < run.Stop; position++ {
			samples = append(samples, order.At(position))
		}
	}
	r.samples = uint64(len(samples))
	for _, block := range w.config.Blocks {
		r.averages = append(r.averages, make([]float32, blockElements(block)))
	}
	var gradients [][]float32
	if len(samples) > 0 {
		gradients, r.lossSum = w.model.Gradient(samples)
		if bad := w.check(gradients, r.lossSum); bad != nil {
			w.fault(bad.Kind, bad)
			return nil
		}
	}
	if err := w.exchange.send(r, gradients); err != nil {
		w.fault(pb.FaultKind_FAULT_KIND_DATA_STREAM_LOST, &pb.Fault{Message: err.Error()})
	}
	return nil
}

func (w *Worker) datasetSize() uint64 {
	return w.config.Plan.XDatasetSize.(*pb.RunPlan_DatasetSize).DatasetSize
}

// check finds what must not be sent (rule: the worker checks before it encodes).
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

// fault tells the coordinator of the present round's defect; it voids the round.
func (w *Worker) fault(kind pb.FaultKind, fault *pb.Fault) {
	fault.Key, fault.Kind = w.round.work.Key, kind
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_Fault{Fault: fault}})
}

var faultKinds = map[pb.BlockFaultKind]pb.FaultKind{
	pb.BlockFaultKind_BLOCK_FAULT_KIND_NON_FINITE:         pb.FaultKind_FAULT_KIND_NON_FINITE_GRADIENT,
	pb.BlockFaultKind_BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: pb.FaultKind_FAULT_KIND_NON_FINITE_AVERAGE,
	pb.BlockFaultKind_BLOCK_FAULT_KIND_ENCODING_OVERFLOW:  pb.FaultKind_FAULT_KIND_ENCODING_OVERFLOW,
}

// average takes what a reducer says of the present round, and passes faults on.
func (w *Worker) average(one event) {
	if one.lost != nil {
		if w.round != nil && !w.round.held {
			w.fault(pb.FaultKind_FAULT_KIND_DATA_STREAM_LOST, &pb.Fault{Message: one.lost.Error()})
		}
		w.exchange.cancel()
		w.exchange = newExchange(w.ctx, w.inbox, w.openReducer)
		return
	}
	if w.round == nil || w.round.held {
		return
	}
	switch it := one.bulk.Message.(type) {
	case *pb.ReduceResponse_AveragedBlock:
		if !w.present(it.AveragedBlock.Key) {
			return
		}
		if err := w.round.take(it.AveragedBlock); err != nil {
			w.fault(pb.FaultKind_FAULT_KIND_PROTOCOL, &pb.Fault{Message: err.Error()})
		} else if w.round.complete() {
			w.ready()
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
		if w.present(it.RoundAborted.Key) {
			w.fault(pb.FaultKind_FAULT_KIND_DATA_STREAM_LOST, &pb.Fault{Message: it.RoundAborted.Message})
		}
	}
}

// ready says that all averages are here. The weights have not moved.
func (w *Worker) ready() {
	r := w.round
	r.held = true
	report := &pb.StepReady{Key: r.work.Key, LossSum: r.lossSum, Weight: float64(r.samples), Samples: r.samples,
		TotalWeight: r.total, WorldSize: r.work.WorldSize}
	if every := uint64(w.welcome.Policy.DigestEvery); every > 0 && w.Step%every == 0 {
		report.Digest = w.digest()
	}
	if w.welcome.Policy.GradientNorm {
		report.XGradientNorm = &pb.StepReady_GradientNorm{GradientNorm: r.norm()}
	}
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_StepReady{StepReady: report}})
}

func (w *Worker) digest() *pb.WeightsDigest {
	return &pb.WeightsDigest{Head: w.head, Sha256: WeightsDigest(w.model.Parameters())}
}

// commit applies a record: a STEP only with its averages held, and only to its parent (rule 7).
func (w *Worker) commit(message *pb.StepCommitted) error {
	record := message.Record
	step := record.Kind == pb.RecordKind_RECORD_KIND_STEP
	founds := record.Kind == pb.RecordKind_RECORD_KIND_FOUND && w.head == nil
	follows := founds || (w.head != nil && keyOf(record.Parent) == keyOf(w.head))
	held := w.present(record.Key) && w.round.held
	if !follows || (step && !held) {
		if w.head != nil && keyOf(record.Key) == keyOf(w.head) {
			return nil
		}
		return errors.New("got a record that can't be applied here")
	}
	if step {
		if w.round.total > 0 {
			w.model.Apply(w.round.averages)
		}
		w.Loss, w.round = message.Loss, nil
	}
	if record.Kind == pb.RecordKind_RECORD_KIND_FOUND && w.state == nil {
		w.state = found(w.model.Parameters(), w.config.Optimizers)
	}
	w.head, w.cursor, w.Step = record.Key, record.Cursor, record.Step
	if message.StopReason != "" {
		return w.leave(message.StopReason)
	}
	w.ask()
	return nil
}

// leave says good-bye, with the digest of the final weights.
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
