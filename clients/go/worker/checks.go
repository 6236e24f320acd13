package worker

import (
	"errors"
	"fmt"

	pb "andon/v1"
)

// Validates messages before anything uses them: docs/protocol.md, section 3. gRPC and protobuf
// reject bytes that they can't parse; this file finds messages that parse but are invalid.

const maxPayloadBytes = 4<<20 - 64<<10

func named(k *pb.Key) bool { return k.GetTerm() != 0 }

// unsupportedLine returns why this client does not support the line that it joined.
func unsupportedLine(welcome *pb.JoinAccepted) error {
	policy := welcome.Policy
	encoding, answers := policy.GetEncoding(), policy.GetAnswerEncoding()
	switch {
	case welcome.JoinStatus < pb.JoinStatus_JOIN_STATUS_IN_SYNC || welcome.JoinStatus > pb.JoinStatus_JOIN_STATUS_FRESH:
		return fmt.Errorf("join status %d is unknown", welcome.JoinStatus)
	case encoding > pb.Encoding_ENCODING_FLOAT32 || answers > pb.Encoding_ENCODING_FLOAT32:
		return errors.New("this client speaks FLOAT32: serve the line with --encoding float32")
	case policy.GetTopology() > pb.Topology_TOPOLOGY_STAR:
		return errors.New("this client does not support rings: serve the line without --topology ring")
	case policy.GetChunkElements() < 1 || 4*uint64(policy.GetChunkElements()) > maxPayloadBytes:
		return fmt.Errorf("chunks of %d elements do not fit into a message", policy.GetChunkElements())
	}
	return nil
}

// messageError returns what is wrong with a message from the coordinator, other than the answer to
// Join.
func messageError(message *pb.TrainResponse) error {
	switch it := message.Message.(type) {
	case *pb.TrainResponse_ShardAssignment:
		work := it.ShardAssignment
		if !named(work.Key) {
			return errors.New("an assignment names no round")
		}
		if work.Rank >= work.WorldSize {
			return fmt.Errorf("an assignment has rank %d in a world of %d", work.Rank, work.WorldSize)
		}
		for _, run := range work.Positions {
			if run.Stop < run.Start {
				return errors.New("a range ends before it starts")
			}
		}
	case *pb.TrainResponse_StepCommitted:
		record := it.StepCommitted.Record
		key, parent := record.GetKey(), record.GetParent()
		switch kind := record.GetKind(); {
		case !named(key):
			return errors.New("a record has no key")
		case kind < pb.RecordKind_RECORD_KIND_INITIAL || kind > pb.RecordKind_RECORD_KIND_MARK:
			return fmt.Errorf("record kind %d is unknown", kind)
		case parent.GetTerm() > key.Term || parent.GetTerm() == key.Term && parent.GetRound() >= key.Round:
			return errors.New("a record does not come after its parent")
		}
	case *pb.TrainResponse_RoundVoided:
		if !named(it.RoundVoided.Key) {
			return errors.New("RoundVoided names no round")
		}
	case *pb.TrainResponse_Halt:
		if evidence := it.Halt.Evidence; evidence.GetId() == 0 || evidence.GetReason() == 0 {
			return errors.New("a halt has no evidence")
		}
	case *pb.TrainResponse_StateTransfer:
		role := it.StateTransfer.Role
		known := role == pb.TransferRole_TRANSFER_ROLE_SEND || role == pb.TransferRole_TRANSFER_ROLE_RECEIVE
		if !known || !named(it.StateTransfer.Head) {
			return errors.New("a transfer has an unknown role, or no head")
		}
	}
	return nil
}

// answerError returns what is wrong with a reducer's answer: its kind is unknown, or it names no
// round.
func answerError(answer *pb.ReduceResponse) error {
	var key *pb.Key
	switch it := answer.Message.(type) {
	case *pb.ReduceResponse_RoundOpened:
		return nil
	case *pb.ReduceResponse_AveragedBlock:
		key = it.AveragedBlock.Key
	case *pb.ReduceResponse_BlockFault:
		key = it.BlockFault.Key
	case *pb.ReduceResponse_StaleRound:
		key = it.StaleRound.Key
	case *pb.ReduceResponse_RoundAborted:
		key = it.RoundAborted.Key
	default:
		return errors.New("a reducer sent a message that this client does not know")
	}
	if !named(key) {
		return errors.New("an answer of a reducer names no round")
	}
	return nil
}
