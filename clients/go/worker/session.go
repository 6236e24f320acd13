package worker

import (
	"context"
	"errors"
	"io/ioutil"
	"os"
	"runtime"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "andon/v1"
)

// A session is one Train stream. It is never resumed: the worker joins again on a new stream.

// Refused means that the line refuses this worker; a retry can't succeed.
type Refused struct{ Message string }

func (r *Refused) Error() string { return "the line refused this worker: " + r.Message }

// Lost means that no coordinator answered within the time limit, or that it dismissed this worker.
type Lost struct{ Message string }

func (l *Lost) Error() string { return "the line is lost: " + l.Message }

// capabilities are what this client can do beyond the steps of every worker: docs/protocol.md,
// Capabilities.
var capabilities = []string{"balance.v1", "norms.v1", "mean-buffers.v1", "overflow.v1", sameBits, verifies, trimmed}

var errOver = errors.New("the run is over")

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// session joins, and works until the stream ends. It returns whether the Join was accepted, and why
// the session ended.
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
	if err := w.join(ctx); err != nil {
		return false, err
	}
	w.outgoing = make(chan *pb.TrainRequest, 64)
	go w.write(w.control, w.outgoing, ctx, seconds(w.welcome.Liveness.GetHeartbeatS()))
	go read(w.control, w.inbox, cancel)
	if err := w.accept(); err != nil {
		return true, err
	}
	return true, w.work()
}

// join sends Join and keeps the JoinAccepted, or returns why there is none.
func (w *Worker) join(ctx context.Context) error {
	first := &pb.TrainRequest{Message: &pb.TrainRequest_Join{Join: w.joinRequest()}}
	if err := w.control.Send(first); err != nil {
		_, err = w.control.Recv() // returns the status
		return w.refusal(err)
	}
	answer, err := w.control.Recv()
	if err != nil {
		return w.refusal(err)
	}
	welcome := answer.GetJoinAccepted()
	if welcome == nil {
		return &Refused{"the coordinator did not answer Join with JoinAccepted"}
	}
	w.welcome, w.ctx, w.inbox, w.askedOnce = welcome, ctx, newInbox(), false
	w.reopen()
	w.see(welcome.Term)
	if err := unsupportedLine(welcome); err != nil {
		return &Refused{err.Error()}
	}
	return nil
}

// joinRequest returns this worker's Join.
func (w *Worker) joinRequest() *pb.Join {
	host, _ := os.Hostname()
	join := &pb.Join{
		RunId: w.config.RunID, NodeId: host, Incarnation: w.incarnation, Backend: "cpu", ProtocolVersion: 1,
		Devices: []*pb.Device{{Kind: "cpu", Name: "go"}}, Capabilities: capabilities,
		Layout: &pb.Layout{Blocks: w.config.Blocks, Digest: LayoutDigest(w.config.Blocks)},
		Plan:   w.config.Plan, Head: w.head, Cursor: w.cursor, Step: w.Step,
		GreatestTerm: w.greatest, Halt: w.halt, Token: w.config.Token,
	}
	if w.config.Plan.Grain > 0 {
		join.Arithmetic = arithmetic()
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

// arithmetic returns what decides the bits of this worker's sums and products, in rising order of
// names: docs/protocol-same-bits.md, section 36. `math.Exp` uses other instructions on other
// processors.
func arithmetic() []*pb.ArithmeticItem {
	processor := runtime.GOARCH
	text, _ := ioutil.ReadFile("/proc/cpuinfo")
	for _, line := range strings.Split(string(text), "\n") {
		if strings.HasPrefix(line, "model name") {
			processor = strings.TrimSpace(line[strings.Index(line, ":")+1:])
			break
		}
	}
	return []*pb.ArithmeticItem{{Name: "client", Value: "andon-go, " + runtime.Version()}, {Name: "processor", Value: processor}}
}

// refusal returns *Refused for a status that a retry can't change, and the error itself otherwise.
func (w *Worker) refusal(err error) error {
	switch code := status.Code(err); code {
	case codes.FailedPrecondition, codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied,
		codes.NotFound, codes.Unimplemented:
		return &Refused{status.Convert(err).Message()}
	case codes.AlreadyExists:
		if w.welcome == nil { // after a reconnect, our own dead stream may still hold the slot
			return &Refused{status.Convert(err).Message()}
		}
	}
	return err
}

// read puts what the coordinator says into the inbox.
func read(stream pb.Coordinator_TrainClient, box *inbox, cancel context.CancelFunc) {
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
