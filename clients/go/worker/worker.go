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
	case codes.FailedPrecondition, codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied,
		codes.NotFound, codes.Unimplemented:
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
