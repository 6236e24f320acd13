package worker

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io/ioutil"
	"math"
	"reflect"
	"strconv"
	"testing"

	"github.com/golang/protobuf/jsonpb"
	"github.com/golang/protobuf/proto"

	pb "andon/v1"
)

func vectors(t *testing.T, name string, into interface{}) {
	text, err := ioutil.ReadFile("../../../conformance/" + name + ".json")
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func number(t *testing.T, text string) uint64 {
	value, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestOrder(t *testing.T) {
	var file struct {
		SplitMix64 []struct{ State, Output string } `json:"splitmix64"`
		Orders     []struct {
			Seed, Epoch, Size  string
			Positions, Samples []string
		}
	}
	vectors(t, "order", &file)
	for _, one := range file.SplitMix64 {
		if found := SplitMix64(number(t, one.State)); found != number(t, one.Output) {
			t.Errorf("splitmix64(%s) is %s, not %d", one.State, one.Output, found)
		}
	}
	for _, one := range file.Orders {
		order := NewOrder(number(t, one.Seed), number(t, one.Epoch), number(t, one.Size))
		for i, position := range one.Positions {
			if found := order.At(number(t, position)); found != number(t, one.Samples[i]) {
				t.Errorf("position %s of %s is %s, not %d", position, one.Size, one.Samples[i], found)
			}
		}
	}
}

func TestLayoutDigest(t *testing.T) {
	var file struct {
		Layouts []struct {
			Name, Digest string
			Elements     uint64
			Blocks       []struct {
				Kind, Name string
				Components []struct {
					Name, Dtype string
					Shape       []uint64
				}
			}
		}
	}
	vectors(t, "layout", &file)
	for _, one := range file.Layouts {
		var blocks []*pb.Block
		elements := uint64(0)
		for _, given := range one.Blocks {
			block := &pb.Block{Name: given.Name, Kind: pb.BlockKind(pb.BlockKind_value["BLOCK_KIND_"+given.Kind])}
			for _, part := range given.Components {
				dtype := pb.Dtype(pb.Dtype_value["DTYPE_"+part.Dtype])
				block.Components = append(block.Components, &pb.Component{Name: part.Name, Shape: part.Shape, Dtype: dtype})
			}
			blocks = append(blocks, block)
			elements += blockElements(block)
		}
		if found := hex.EncodeToString(LayoutDigest(blocks)); found != one.Digest || elements != one.Elements {
			t.Errorf("layout %s: %s, %d elements", one.Name, found, elements)
		}
	}
}

func TestWeightsDigest(t *testing.T) {
	var file struct {
		Weights []struct {
			Name, SHA256 string
			Tensors      []struct {
				Name, Dtype, Bytes string
				Shape              []uint64
			}
		}
	}
	vectors(t, "weights", &file)
	for _, one := range file.Weights {
		digest := sha256.New()
		for _, tensor := range one.Tensors {
			raw, err := hex.DecodeString(tensor.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			addWeights(digest, tensor.Name, tensor.Dtype, tensor.Shape, raw)
		}
		if found := hex.EncodeToString(digest.Sum(nil)); found != one.SHA256 {
			t.Errorf("weights %s: %s", one.Name, found)
		}
	}
}

// message reads a message of conformance/messages/.
func message(t *testing.T, name string, into proto.Message) {
	var file struct{ Message json.RawMessage }
	vectors(t, "messages/"+name, &file)
	if err := jsonpb.UnmarshalString(string(file.Message), into); err != nil {
		t.Fatal(err)
	}
}

func TestChecksums(t *testing.T) {
	for _, name := range []string{"ReduceRequest.block_gradient.checksums", "ReduceRequest.abstain.checksums",
		"ReduceRequest.block_gradient.node.checksums"} {
		given, made := &pb.ReduceRequest{}, &pb.ReduceRequest{}
		message(t, name, given)
		made.Message = given.Message
		if !proto.Equal(sealed(made), given) {
			t.Errorf("%s: made %v", name, made)
		}
	}
	answer := &pb.ReduceResponse{}
	message(t, "ReduceResponse.averaged_block.checksums", answer)
	if !headerIntact(answer) || !payloadIntact(answer) {
		t.Error("the average does not match its checksums")
	}
	answer.GetAveragedBlock().GetPayload()[0] ^= 1
	if !headerIntact(answer) || payloadIntact(answer) {
		t.Error("a changed payload is not noticed, or it is the header that is blamed")
	}
	answer.GetAveragedBlock().TotalWeight++
	if headerIntact(answer) {
		t.Error("a changed header is not noticed")
	}
}

func span(of [2]uint64) node { return node{of[0], of[1]} }

func TestTree(t *testing.T) {
	var file struct {
		Covers []struct {
			Name        string
			Grains      uint64
			Runs, Nodes [][2]uint64
		}
		Means []struct {
			Name   string
			Grain  uint32
			Grains []struct {
				Weight   float64
				Gradient string
			}
			ElementCount int `json:"element_count"`
			Ranks        [][]struct {
				Node    [2]uint64
				Weight  float64
				Payload string
			}
			Answer struct{ Payload string }
		}
	}
	vectors(t, "tree", &file)
	for _, one := range file.Covers {
		owned := map[uint64][]uint64{}
		for _, run := range one.Runs {
			for grain := run[0]; grain < run[1]; grain++ {
				owned[grain] = []uint64{}
			}
		}
		var expected []node
		for _, each := range one.Nodes {
			expected = append(expected, span(each))
		}
		if found := (node{0, one.Grains}).cover(owned); !reflect.DeepEqual(found, expected) {
			t.Errorf("cover of %s: %v", one.Name, found)
		}
	}
	for _, one := range file.Means {
		leaf := func(at node) (contribution, bool) {
			if at.stop-at.first > 1 {
				return contribution{}, false
			}
			of := one.Grains[at.first]
			raw, err := hex.DecodeString(of.Gradient)
			if err != nil {
				t.Fatal(err)
			}
			numbers := make([]float32, one.ElementCount)
			readFloats(numbers[:len(raw)/4], raw)
			if of.Weight == 0 {
				for i := range numbers {
					numbers[i] = float32(math.Copysign(0, -1))
				}
			} else {
				scale([][]float32{numbers}, of.Weight, one.Grain, uint64(len(one.Grains)))
			}
			return contribution{weight: of.Weight, gradients: [][]float32{numbers}}, true
		}
		for _, rank := range one.Ranks {
			for _, each := range rank {
				sum := span(each.Node).sum(leaf)
				if found := hex.EncodeToString(Floats(sum.gradients[0])); found != each.Payload || sum.weight != each.Weight {
					t.Errorf("%s: node %v of weight %g is %s", one.Name, each.Node, sum.weight, found)
				}
			}
		}
		root := (node{0, uint64(len(one.Grains))}).sum(leaf)
		divide(root.gradients, root.weight, one.Grain, uint64(len(one.Grains)))
		if found := hex.EncodeToString(Floats(root.gradients[0])); found != one.Answer.Payload {
			t.Errorf("the mean of %s is %s", one.Name, found)
		}
	}
}

func TestAttestations(t *testing.T) {
	var file struct {
		Digests []struct {
			Name, Digest       string
			Components, Hashes []string
		}
	}
	vectors(t, "attestations", &file)
	for _, one := range file.Digests {
		var hashes []byte
		for i, component := range one.Components {
			raw, err := hex.DecodeString(component) // an absent one has no bytes
			if err != nil {
				t.Fatal(err)
			}
			hash := hash128(raw)
			if found := hex.EncodeToString(hash); found != one.Hashes[i] {
				t.Errorf("component %d of %s: %s", i, one.Name, found)
			}
			hashes = append(hashes, hash...)
		}
		if found := hex.EncodeToString(hash128(hashes)); found != one.Digest {
			t.Errorf("%s: %s", one.Name, found)
		}
	}
}
