// Package worker is one worker on an Andon line. It implements docs/protocol.md.
//
// Theory of operation. One goroutine owns all state here and takes events from an inbox; the
// streams' goroutines only put events into it. Only records and transfers move the head (rule 7).
package worker

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	mathrand "math/rand"
	"time"

	pb "andon/v1"
)

// A Model is the model that a worker trains.
type Model interface {
	// Parameters returns all weights, in the order of the state dict. They are modified in place.
	Parameters() []Tensor
	// Gradient returns the mean gradient over the samples, as one flat vector for each block, and
	// the sum of the samples' losses.
	Gradient(samples []uint64) (gradients [][]float32, lossSum float64)
	// Sample returns the bytes that Gradient reads of one sample: workers compare their hashes.
	Sample(index uint64) []byte
	// Apply updates the weights with the averages of a committed step.
	Apply(averages [][]float32)
}

// A Config says which line to join, and the worker's model and plan.
type Config struct {
	Address, RunID string
	Slot           *uint32 // the launcher's slot; nil if it gave none
	Token          []byte
	TLS            string // a folder; empty is plaintext
	Blocks         []*pb.Block
	Plan           *pb.RunPlan
	Optimizers     string // for the state if this worker bootstraps; docs/protocol-data.md, section 18
}

const firstPatience, longestWait = 300 * time.Second, 2 * time.Second

type key struct{ term, round uint64 }

func keyOf(k *pb.Key) key { return key{k.GetTerm(), k.GetRound()} }

// Worker is one worker on a line. After Run, Step and Loss are those of the last step.
type Worker struct {
	config Config
	model  Model

	Step uint64
	Loss float64

	incarnation, greatest uint64
	head                  *pb.Key
	cursor                *pb.Cursor
	state                 []byte // as received, or as built to bootstrap the line
	arrived               []byte // the received part of an interrupted transfer
	arrivedSum            []byte
	round                 *round
	halt                  *pb.HaltEvidence
	stop                  string

	welcome   *pb.JoinAccepted
	control   pb.Coordinator_TrainClient
	outgoing  chan *pb.TrainRequest
	ctx       context.Context // the session's
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
	if config.Plan.Grain > 0 {
		config.Plan.Tree = treeVersion
	}
	return &Worker{config: config, model: model, incarnation: binary.LittleEndian.Uint64(random[:])}
}

// Run trains until the run is over; it returns *Refused or *Lost if it can't.
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

// accept takes over the join status: in sync, or waiting for a state or for the line.
func (w *Worker) accept() error {
	w.halt = w.welcome.Halt
	inSync := w.welcome.JoinStatus == pb.JoinStatus_JOIN_STATUS_IN_SYNC
	if inSync && keyOf(w.welcome.Head) != keyOf(w.head) {
		return &Lost{"the coordinator reports this worker in sync with a head that it does not hold"}
	}
	if w.round != nil && (inSync || !w.round.held) {
		w.round = nil // the round is void, or its record was never written
	}
	if inSync {
		w.ask()
	}
	return nil
}

// work handles events one by one, until the session ends.
func (w *Worker) work() error {
	for {
		one := w.inbox.take()
		var err error
		switch {
		case one.control != nil:
			err = w.obey(one.control)
		case one.from != nil && one.from == w.exchange:
			w.average(one)
		case one.from == nil:
			err = fmt.Errorf("the coordinator was lost: %w", w.refusal(one.lost))
		}
		if err != nil {
			return err
		}
	}
}

func (w *Worker) see(term uint64) {
	if term > w.greatest {
		w.greatest = term
	}
}

// ask requests work, once for each head on a stream.
func (w *Worker) ask() {
	if w.head == nil || w.halt != nil || (w.askedOnce && w.asked == keyOf(w.head)) {
		return
	}
	w.asked, w.askedOnce = keyOf(w.head), true
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_RequestWork{RequestWork: &pb.RequestWork{Head: w.head}}})
}

// void abandons the current round. Its averages are ignored from now on.
func (w *Worker) void(why string) {
	if w.round == nil {
		return
	}
	log.Printf("step %d is tried again: %s", w.round.work.Step, why)
	if !w.round.held {
		w.reopen()
	}
	w.round = nil
}

func (w *Worker) present(k *pb.Key) bool {
	return w.round != nil && keyOf(w.round.work.Key) == keyOf(k)
}

// obey handles a message from the coordinator; an error ends the session.
func (w *Worker) obey(message *pb.TrainResponse) error {
	if err := messageError(message); err != nil {
		return fmt.Errorf("the coordinator sent an invalid message: %w", err)
	}
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
	return nil // unknown messages are ignored
}
