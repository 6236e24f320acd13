package worker

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"google.golang.org/grpc"

	pb "andon/v1"
)

const trimmed = "trimmed.v1" // the capability of reducers that make trimmed means

// A bulkStream is a stream to a reducer.
type bulkStream struct {
	pb.Reducer_ReduceClient
	opened chan struct{} // closed once the reducer takes what the line needs
}

// An exchange is the worker's streams to the reducers. If a round is void before all its averages
// arrived, its exchange is discarded and the next round opens another one (rule 16).
type exchange struct {
	ctx     context.Context
	cancel  context.CancelFunc
	streams map[string]*bulkStream
	open    func(context.Context, string) (*grpc.ClientConn, pb.Reducer_ReduceClient, error)
	needs   string // a capability without which nothing is sent to a reducer; empty: none
	inbox   *inbox
}

func newExchange(ctx context.Context, box *inbox, needs string, open func(context.Context, string) (*grpc.ClientConn, pb.Reducer_ReduceClient, error)) *exchange {
	ctx, cancel := context.WithCancel(ctx)
	return &exchange{ctx: ctx, cancel: cancel, streams: map[string]*bulkStream{}, open: open, needs: needs, inbox: box}
}

// to returns the stream to a reducer, and opens it if necessary. Its answers go to the inbox.
func (x *exchange) to(address string) (*bulkStream, error) {
	if stream, ok := x.streams[address]; ok {
		return stream, nil
	}
	connection, call, err := x.open(x.ctx, address)
	if err != nil {
		return nil, err
	}
	stream := &bulkStream{call, make(chan struct{})}
	x.streams[address] = stream
	go func() {
		defer connection.Close()
		agreed, able := false, false // the reducer's averages have checksums; it takes what the line needs
		for {
			answer, err := stream.Recv()
			if err == nil && !headerIntact(answer) {
				err = errors.New("an average does not match its header_crc32c")
			}
			if opened := answer.GetRoundOpened(); opened != nil {
				agreed = has(opened.Capabilities, checksums)
				if !able && (x.needs == "" || has(opened.Capabilities, x.needs)) {
					able = true
					close(stream.opened)
				}
			}
			corrupt := err == nil && agreed && !payloadIntact(answer)
			x.inbox.put(event{bulk: answer, from: x, lost: err, corrupt: corrupt})
			if err != nil {
				return
			}
		}
	}()
	return stream, nil
}

// openReducer opens a stream to a reducer for an exchange.
func (w *Worker) openReducer(ctx context.Context, address string) (*grpc.ClientConn, pb.Reducer_ReduceClient, error) {
	if address == "" {
		address = w.config.Address
	}
	connection, err := Dial(address, w.config.TLS)
	if err != nil {
		return nil, nil, err
	}
	capabilities := []string{checksums}
	if needs := w.needs(); needs != "" {
		capabilities = append(capabilities, needs)
	}
	stream, err := pb.NewReducerClient(connection).Reduce(ctx)
	if err == nil {
		err = stream.Send(&pb.ReduceRequest{Message: &pb.ReduceRequest_OpenRound{OpenRound: &pb.OpenRound{
			RunId: w.config.RunID, Worker: w.welcome.Worker, SessionToken: w.welcome.SessionToken,
			Capabilities: capabilities}}})
	}
	if err != nil {
		connection.Close()
		return nil, nil, err
	}
	return connection, stream, nil
}

// reopen discards the streams to the reducers, and ignores all later answers on them.
func (w *Worker) reopen() {
	if w.exchange != nil {
		w.exchange.cancel()
	}
	w.exchange = newExchange(w.ctx, w.inbox, w.needs(), w.openReducer)
}

// needs is the capability without which no reducer can do what the line asks for; empty: each can.
func (w *Worker) needs() string {
	switch {
	case w.config.Plan.Grain > 0:
		return sameBits
	case w.welcome.GetPolicy().GetMean() == pb.MeanKind_MEAN_KIND_TRIMMED:
		return trimmed
	}
	return ""
}

func has(capabilities []string, wanted string) bool {
	for _, each := range capabilities {
		if each == wanted {
			return true
		}
	}
	return false
}

// A chunk is a run of elements of one block, and the reducer that averages it.
type chunk struct {
	block         int
	offset, count uint64
	address       string
}

// cut divides the blocks into chunks, in the layout's order. The reducer that has a chunk's first
// element averages it.
func cut(blocks []*pb.Block, size uint64, shares []*pb.ReducerShare) ([]chunk, error) {
	var chunks []chunk
	flat, at := uint64(0), 0
	for index, block := range blocks {
		elements := blockElements(block)
		for offset := uint64(0); offset < elements; offset += size {
			count := size
			if elements-offset < size {
				count = elements - offset
			}
			for at < len(shares) && shares[at].StopElement <= flat+offset {
				at++
			}
			if at == len(shares) || shares[at].StartElement > flat+offset || shares[at].StopElement < flat+offset+count {
				return nil, fmt.Errorf("the map of reducers does not cover block %d from element %d on", index, offset)
			}
			chunks = append(chunks, chunk{index, offset, count, shares[at].Address})
		}
		flat += elements
	}
	return chunks, nil
}

func blockElements(block *pb.Block) uint64 {
	elements := uint64(0)
	for _, component := range block.Components {
		elements += Elements(component.Shape)
	}
	return elements
}

// A position names a chunk within a round.
type position struct {
	block  int
	offset uint64
}

// A round is one attempt at a step.
type round struct {
	work          *pb.ShardAssignment
	chunks        []chunk
	waiting       map[position]chunk
	reducers      map[string]bool
	verification  *verification  // only if the assignment has `attests`
	averages      [][]float32    // of the gradients
	sequence      uint32         // the exchange that is made
	outgoing      []contribution // what this rank contributes to it
	incoming      [][]float32    // where its averages go
	weight        float64        // their total weight
	samples       uint64
	contributions []contribution // in rising order; none if there are no samples
	busy          time.Duration  // how long the gradients took
	ownNorm       float64        // L2 norm of the gradient, before it was limited
	total         float64
	answered      int
	silent        int // reducers that reported that all ranks abstained
	held          bool

	backwards uint32 // gradients that were computed
}

func newRound(work *pb.ShardAssignment, chunks []chunk, blocks []*pb.Block) *round {
	r := &round{work: work, chunks: chunks, reducers: map[string]bool{}}
	for _, piece := range chunks {
		r.reducers[piece.address] = true
	}
	r.await(blocks)
	r.averages = r.incoming
	return r
}

// await begins an exchange: all of its averages are still to come.
func (r *round) await(blocks []*pb.Block) {
	r.waiting, r.incoming, r.answered, r.silent = map[position]chunk{}, nil, 0, 0
	for _, piece := range r.chunks {
		r.waiting[position{piece.block, piece.offset}] = piece
	}
	for _, block := range blocks {
		r.incoming = append(r.incoming, make([]float32, blockElements(block)))
	}
}

// next begins the next exchange, of a sum whose owner sends it to all; false if there is none left.
// The error is that the assignment's sums do not make up the batch.
func (r *round) next(blocks []*pb.Block, grain uint32) (bool, error) {
	v, at := r.verification, int(r.sequence)
	if at == 0 {
		r.total = r.weight
	} else {
		v.take(v.relayed[at-1], r.incoming)
	}
	if v == nil {
		return false, nil
	}
	if at == len(v.relayed) {
		return false, v.compare(r.averages, r.total, grain)
	}
	r.sequence++
	r.outgoing = nil
	if of := v.relayed[at]; of.Rank == r.work.Rank {
		r.outgoing = []contribution{{weight: 1, gradients: v.sums[nodeOf(of)]}}
	}
	r.await(blocks)
	return true, nil
}

// take stores one average. All averages must agree on total weight and world size (rule 15).
func (r *round) take(average *pb.AveragedBlock) error {
	switch {
	case average.Group != 0 || average.Sequence != r.sequence:
		return errors.New("an average belongs to another exchange")
	case average.WorldSize != r.work.WorldSize:
		return fmt.Errorf("an average has world_size %d, and the round has %d", average.WorldSize, r.work.WorldSize)
	case r.answered > 0 && average.TotalWeight != r.weight:
		return fmt.Errorf("averages have different total weights: %g and %g", r.weight, average.TotalWeight)
	}
	r.weight = average.TotalWeight
	r.answered++
	if average.ElementCount == 0 && average.TotalWeight == 0 {
		r.silent++
		return nil
	}
	at := position{int(average.Block), average.ElementOffset}
	piece, awaited := r.waiting[at]
	raw := average.GetPayload()
	if !awaited || piece.count != average.ElementCount || uint64(len(raw)) != 4*piece.count || average.Encoding != pb.Encoding_ENCODING_FLOAT32 {
		return fmt.Errorf("the average of block %d from element %d on is not one that this round awaits", average.Block, average.ElementOffset)
	}
	readFloats(r.incoming[piece.block][piece.offset:piece.offset+piece.count], raw)
	delete(r.waiting, at)
	return nil
}

// largest returns the number of elements in the largest chunk.
func (r *round) largest() uint64 {
	most := uint64(0)
	for _, piece := range r.chunks {
		if piece.count > most {
			most = piece.count
		}
	}
	return most
}

// complete reports whether every average arrived, or every reducer reported that all ranks
// abstained.
func (r *round) complete() bool {
	return len(r.waiting) == 0 || r.silent == len(r.reducers)
}

// timings returns how long this attempt computed, and how much. Nothing is kept of an earlier
// attempt.
func (r *round) timings() *pb.Timings {
	return &pb.Timings{BusyS: r.busy.Seconds(), MicroBatches: r.backwards, Computed: r.samples}
}

// norm returns the L2 norm of all blocks together, in float64.
func norm(blocks [][]float32) float64 {
	sum := 0.0
	for _, block := range blocks {
		for _, number := range block {
			sum += float64(number) * float64(number)
		}
	}
	return math.Sqrt(sum)
}

// limit scales a gradient of norm `own` down to the norm `most`; 0 is no limit. A norm that is not
// finite stays, so that the value is found.
func limit(gradients [][]float32, own, most float64) {
	if most <= 0 || !(own > most) || math.IsInf(own, 0) {
		return
	}
	for _, block := range gradients {
		for i, number := range block {
			block[i] = float32(float64(number) * (most / own))
		}
	}
}

// A delivery is one message for one stream.
type delivery struct {
	stream  *bulkStream
	message *pb.ReduceRequest
}

// send writes what the round contributes to its present exchange chunk by chunk, or one Abstain to each
// reducer. The reading goroutine reports errors.
func (x *exchange) send(r *round) error {
	var deliveries []delivery
	told := map[string]bool{}
	for _, piece := range r.chunks {
		stream, err := x.to(piece.address)
		if err != nil {
			return err
		}
		if len(r.outgoing) == 0 && !told[piece.address] {
			told[piece.address] = true
			abstain := &pb.Abstain{Key: r.work.Key, Sequence: r.sequence, Rank: r.work.Rank, WorldSize: r.work.WorldSize}
			message := sealed(&pb.ReduceRequest{Message: &pb.ReduceRequest_Abstain{Abstain: abstain}})
			deliveries = append(deliveries, delivery{stream, message})
		}
		for _, each := range r.outgoing {
			message := sealed(&pb.ReduceRequest{Message: &pb.ReduceRequest_BlockGradient{BlockGradient: r.slice(piece, each, x.operation())}})
			deliveries = append(deliveries, delivery{stream, message})
		}
	}
	go func() {
		for _, each := range deliveries {
			if x.needs != "" {
				select {
				case <-each.stream.opened:
				case <-x.ctx.Done():
					return
				}
			}
			if each.stream.Send(each.message) != nil {
				return
			}
		}
	}()
	return nil
}

// operation is what reducers make of gradients.
func (x *exchange) operation() pb.Operation {
	if x.needs == trimmed {
		return pb.Operation_OPERATION_TRIMMED_MEAN
	}
	return pb.Operation_OPERATION_WEIGHTED_MEAN
}

// slice is one chunk of a contribution.
func (r *round) slice(piece chunk, of contribution, operation pb.Operation) *pb.BlockGradient {
	numbers := of.gradients[piece.block][piece.offset : piece.offset+piece.count]
	return &pb.BlockGradient{
		Key: r.work.Key, Sequence: r.sequence, Operation: operation,
		Rank: r.work.Rank, WorldSize: r.work.WorldSize, Block: uint32(piece.block),
		ElementOffset: piece.offset, ElementCount: piece.count, Weight: of.weight,
		Encoding: pb.Encoding_ENCODING_FLOAT32, Node: of.node,
		Content: &pb.BlockGradient_Payload{Payload: Floats(numbers)},
	}
}
