package worker

import (
	"encoding/binary"
	"hash/crc32"
	"math"

	pb "andon/v1"
)

// CRC-32C of what travels in bulk: docs/protocol-data.md, section 16.

const checksums = "crc32c.v1"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// A header is the number of the message's case and its fields, little-endian and at full width.
type header []byte

func (h header) u32(numbers ...uint32) header {
	for _, number := range numbers {
		h = append(h, 0, 0, 0, 0)
		binary.LittleEndian.PutUint32(h[len(h)-4:], number)
	}
	return h
}

func (h header) u64(numbers ...uint64) header {
	for _, number := range numbers {
		h = append(h, 0, 0, 0, 0, 0, 0, 0, 0)
		binary.LittleEndian.PutUint64(h[len(h)-8:], number)
	}
	return h
}

func (h header) crc() uint32 { return crc32.Checksum(h, castagnoli) }

func headerOfGradient(g *pb.BlockGradient) header {
	fields := header{}.u32(2).u64(g.Key.GetTerm(), g.Key.GetRound()).
		u32(g.Group, g.Sequence, uint32(g.Operation), g.Rank, g.WorldSize, g.Block).
		u64(g.ElementOffset, g.ElementCount, math.Float64bits(g.Weight)).
		u32(uint32(g.Encoding), uint32(g.AnswerEncoding))
	if n := g.Node; n != nil {
		fields = fields.u32(n.First, n.Grains, n.BatchGrains, n.Grain)
	}
	return fields
}

func headerOfAbstain(a *pb.Abstain) header {
	return header{}.u32(3).u64(a.Key.GetTerm(), a.Key.GetRound()).u32(a.Group, a.Sequence, a.Rank, a.WorldSize)
}

func headerOfAverage(a *pb.AveragedBlock) header {
	return header{}.u32(2).u64(a.Key.GetTerm(), a.Key.GetRound()).
		u32(a.Group, a.Sequence, uint32(a.Operation), a.Contributors, a.WorldSize, a.Block).
		u64(a.ElementOffset, a.ElementCount, math.Float64bits(a.TotalWeight)).
		u32(uint32(a.Encoding))
}

// sealed puts the checksums beside a contribution: that of its header, and with a payload that of both.
func sealed(request *pb.ReduceRequest) *pb.ReduceRequest {
	switch it := request.Message.(type) {
	case *pb.ReduceRequest_BlockGradient:
		crc := headerOfGradient(it.BlockGradient).crc()
		request.XHeaderCrc32C = &pb.ReduceRequest_HeaderCrc32C{HeaderCrc32C: crc}
		whole := crc32.Update(crc, castagnoli, it.BlockGradient.GetPayload())
		request.XCrc32C = &pb.ReduceRequest_Crc32C{Crc32C: whole}
	case *pb.ReduceRequest_Abstain:
		crc := headerOfAbstain(it.Abstain).crc()
		request.XHeaderCrc32C = &pb.ReduceRequest_HeaderCrc32C{HeaderCrc32C: crc}
	}
	return request
}

// headerIntact reports whether a reducer's answer is what was sent, as far as a checksum of its
// header says so.
func headerIntact(answer *pb.ReduceResponse) bool {
	average, told := answer.GetAveragedBlock(), answer.XHeaderCrc32C
	if average == nil || told == nil {
		return true
	}
	return answer.GetHeaderCrc32C() == headerOfAverage(average).crc()
}

// payloadIntact reports whether an average has a checksum, and matches it. One without numbers needs none.
func payloadIntact(answer *pb.ReduceResponse) bool {
	average := answer.GetAveragedBlock()
	if average == nil || len(average.GetPayload()) == 0 {
		return true
	}
	whole := crc32.Update(headerOfAverage(average).crc(), castagnoli, average.GetPayload())
	return answer.XCrc32C != nil && answer.GetCrc32C() == whole
}
