// Package worker is one worker's place on an Andon line. It speaks docs/protocol.md.
//
// Theory of operation. One goroutine owns everything here and takes events from an inbox; the
// streams' goroutines only put events there. The head moves by records and transfers alone (rule 7).
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
	Optimizers     string // what a founder says of its optimizers; docs/protocol.md, section 18
}

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

// accept stands where the coordinator says: in sync, or waiting for a state or for the line.
func (w *Worker) accept() error {
	w.halt = w.welcome.Halt
	inSync := w.welcome.JoinStatus == pb.JoinStatus_JOIN_STATUS_IN_SYNC
	if inSync && keyOf(w.welcome.Head) != keyOf(w.head) {
		return &Lost{"the coordinator calls this worker in sync with a head that it does not have"}
	}
	if w.round != nil && (inSync || !w.round.held) {
		w.round = nil // void, or its record was not written
	}
	if inSync {
		w.ask()
	}
	return nil
}

// work takes events, one by one, until the session ends.
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
		w.reopen()
	}
	w.round = nil
}

func (w *Worker) present(k *pb.Key) bool {
	return w.round != nil && keyOf(w.round.work.Key) == keyOf(k)
}

// obey does what the coordinator says; an error ends the session.
func (w *Worker) obey(message *pb.TrainResponse) error {
	if err := wrongWord(message); err != nil {
		return fmt.Errorf("the coordinator sent what can't be: %w", err)
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
	return nil // what is not known is ignored
}
