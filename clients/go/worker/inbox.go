package worker

import (
	"sync"

	pb "andon/v1"
)

// An event is something that arrived on a stream. The worker's event loop takes all events.
type event struct {
	control *pb.TrainResponse
	bulk    *pb.ReduceResponse
	from    *exchange
	lost    error
	corrupt bool // bulk is an average that does not match its checksum
}

// An inbox never blocks its writers, because a worker must read while it writes (rule 16).
type inbox struct {
	mutex  sync.Mutex
	events []event
	ready  chan struct{}
}

func newInbox() *inbox { return &inbox{ready: make(chan struct{}, 1)} }

func (b *inbox) put(one event) {
	b.mutex.Lock()
	b.events = append(b.events, one)
	b.mutex.Unlock()
	select {
	case b.ready <- struct{}{}:
	default:
	}
}

func (b *inbox) take() event {
	for {
		b.mutex.Lock()
		if len(b.events) > 0 {
			one := b.events[0]
			b.events = b.events[1:]
			b.mutex.Unlock()
			return one
		}
		b.mutex.Unlock()
		<-b.ready
	}
}
