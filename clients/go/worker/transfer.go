package worker

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"

	pb "andon/v1"
)

const pieceBytes = 1 << 20

// transfer sends or receives state while no round runs, then reports the result (rule 10).
func (w *Worker) transfer(asked *pb.StateTransfer) {
	sends := asked.Role == pb.TransferRole_TRANSFER_ROLE_SEND
	var err error
	switch {
	case sends && keyOf(asked.Head) != keyOf(w.head):
		err = errors.New("this worker is not at the head that the transfer names")
	case sends:
		err = w.give(asked)
	default:
		err = w.receive(asked)
	}
	report := &pb.StateReport{TransferId: asked.TransferId}
	if err != nil {
		log.Printf("a state transfer failed: %v", err)
		report.Failure = err.Error()
	} else if !sends {
		w.head, w.cursor, w.Step, w.round = asked.Head, asked.Cursor, asked.Step, nil
	}
	report.Head = w.head
	w.send(&pb.TrainRequest{Message: &pb.TrainRequest_StateReport{StateReport: report}})
	if err == nil {
		w.ask()
	}
}

func (w *Worker) relay(asked *pb.StateTransfer) (pb.ReducerClient, io.Closer, error) {
	address := asked.Address
	if address == "" {
		address = w.config.Address
	}
	connection, err := Dial(address, w.config.TLS)
	if err != nil {
		return nil, nil, err
	}
	return pb.NewReducerClient(connection), connection, nil
}

// give sends the part of this worker's state that the other end lacks.
func (w *Worker) give(asked *pb.StateTransfer) error {
	if err := patch(w.state, w.model.Parameters()); err != nil {
		return err
	}
	reducer, connection, err := w.relay(asked)
	if err != nil {
		return err
	}
	defer connection.Close()
	stream, err := reducer.PutState(w.ctx)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(w.state)
	first := &pb.PutStateRequest{RunId: w.config.RunID, Worker: w.welcome.Worker, SessionToken: w.welcome.SessionToken,
		TransferId: asked.TransferId, Head: asked.Head, SizeBytes: uint64(len(w.state)), Sha256: sum[:]}
	if err := stream.Send(first); err != nil && err != io.EOF {
		return err
	}
	answer, err := stream.Recv()
	if err != nil {
		return err
	}
	if answer.Offset > uint64(len(w.state)) {
		return fmt.Errorf("the other end requested byte %d of a state of %d bytes", answer.Offset, len(w.state))
	}
	for rest := w.state[answer.Offset:]; len(rest) > 0; {
		piece := rest
		if len(piece) > pieceBytes {
			piece = rest[:pieceBytes]
		}
		rest = rest[len(piece):]
		if stream.Send(&pb.PutStateRequest{Payload: piece}) != nil {
			break // Recv reports the reason
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if _, err := stream.Recv(); err != io.EOF {
		return fmt.Errorf("the other end did not accept the state: %v", err)
	}
	return nil
}

// receive installs another worker's state, complete and verified, or nothing. It keeps a partial
// state, and the next transfer continues it.
func (w *Worker) receive(asked *pb.StateTransfer) error {
	reducer, connection, err := w.relay(asked)
	if err != nil {
		return err
	}
	defer connection.Close()
	stream, err := reducer.GetState(w.ctx, &pb.GetStateRequest{RunId: w.config.RunID, Worker: w.welcome.Worker,
		SessionToken: w.welcome.SessionToken, TransferId: asked.TransferId, Head: asked.Head,
		Offset: uint64(len(w.arrived)), Sha256: w.arrivedSum})
	if err != nil {
		return err
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if !bytes.Equal(first.Sha256, w.arrivedSum) || first.Offset != uint64(len(w.arrived)) {
		w.arrived, w.arrivedSum = nil, first.Sha256
	}
	if first.Offset != uint64(len(w.arrived)) {
		return fmt.Errorf("the state begins at byte %d, which was not requested", first.Offset)
	}
	for {
		piece, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		w.arrived = append(w.arrived, piece.Payload...)
		if uint64(len(w.arrived)) > first.SizeBytes {
			break
		}
	}
	state := w.arrived
	w.arrived, w.arrivedSum = nil, nil
	if sum := sha256.Sum256(state); uint64(len(state)) != first.SizeBytes || !bytes.Equal(sum[:], first.Sha256) {
		return errors.New("the received state does not match the announced size or digest")
	}
	if err := install(state, w.model.Parameters()); err != nil {
		return err
	}
	w.state = state
	return nil
}
