package worker

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"sort"
)

// A state is what a worker sends to a newcomer: the length of a JSON skeleton (uint64,
// little-endian), the skeleton, and safetensors; docs/protocol-data.md, section 18. A client reads
// the model's tensors and keeps the rest unchanged. When it sends the state, it puts in its own
// weights.
const modelPrefix = "model."

type place struct {
	Dtype   string   `json:"dtype"`
	Shape   []uint64 `json:"shape"`
	Offsets [2]int   `json:"data_offsets"`
}

// places finds the tensors of a state, with offsets from the state's first byte.
func places(state []byte) (map[string]place, error) {
	at, err := past(state, 0)
	if err != nil {
		return nil, err
	}
	start, err := past(state, at)
	if err != nil {
		return nil, err
	}
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(state[at+8:start], &entries); err != nil {
		return nil, fmt.Errorf("the state has no safetensors header: %v", err)
	}
	found := map[string]place{}
	for name, text := range entries {
		if name == "__metadata__" {
			continue
		}
		var one place
		if err := json.Unmarshal(text, &one); err != nil {
			return nil, fmt.Errorf("the state's tensor %s: %v", name, err)
		}
		one.Offsets[0] += start
		one.Offsets[1] += start
		if one.Offsets[0] < start || one.Offsets[1] < one.Offsets[0] || one.Offsets[1] > len(state) {
			return nil, fmt.Errorf("the state's tensor %s lies outside it", name)
		}
		found[name] = one
	}
	return found, nil
}

// past returns the end of the part whose length field is at byte `at`.
func past(state []byte, at int) (int, error) {
	if len(state) < at+8 {
		return 0, fmt.Errorf("the state is cut short")
	}
	length := binary.LittleEndian.Uint64(state[at:])
	if length > uint64(len(state)-at-8) {
		return 0, fmt.Errorf("the state is cut short")
	}
	return at + 8 + int(length), nil
}

// each validates all tensors in the state, and then calls act with each tensor's bytes.
func each(state []byte, tensors []Tensor, act func(Tensor, []byte)) error {
	found, err := places(state)
	if err != nil {
		return err
	}
	raw := make([][]byte, len(tensors))
	for i, tensor := range tensors {
		one, ok := found[modelPrefix+tensor.Name]
		if !ok {
			return fmt.Errorf("the state has no %s", tensor.Name)
		}
		raw[i] = state[one.Offsets[0]:one.Offsets[1]]
		if one.Dtype != "F32" || decimals(one.Shape) != decimals(tensor.Shape) || len(raw[i]) != 4*len(tensor.Data) {
			return fmt.Errorf("the state's %s is %s of [%s], not F32 of [%s]", tensor.Name, one.Dtype, decimals(one.Shape), decimals(tensor.Shape))
		}
	}
	for i, tensor := range tensors {
		act(tensor, raw[i])
	}
	return nil
}

// install copies the weights out of a state. If it returns an error, it copied none.
func install(state []byte, tensors []Tensor) error {
	return each(state, tensors, func(tensor Tensor, raw []byte) { readFloats(tensor.Data, raw) })
}

// patch writes the current weights into a received state; the rest of it is unchanged.
func patch(state []byte, tensors []Tensor) error {
	return each(state, tensors, func(tensor Tensor, raw []byte) { copy(raw, Floats(tensor.Data)) })
}

// bootstrapState returns the state of a line that this worker bootstraps.
func bootstrapState(tensors []Tensor, optimizers string) []byte {
	type object = map[string]interface{}
	sorted := append([]Tensor{}, tensors...)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].Name < sorted[j].Name })
	var data []byte
	entries := object{}
	names := []interface{}{}
	for _, tensor := range sorted {
		shape := tensor.Shape
		if shape == nil {
			shape = []uint64{}
		}
		begin := len(data)
		data = append(data, Floats(tensor.Data)...)
		entries[modelPrefix+tensor.Name] = place{"F32", shape, [2]int{begin, len(data)}}
		names = append(names, []interface{}{tensor.Name, object{"tensor": modelPrefix + tensor.Name}})
	}
	skeleton := object{"dict": []interface{}{
		[]interface{}{"model", object{"dict": names}},
		[]interface{}{"optimizers", json.RawMessage(optimizers)},
		[]interface{}{"registered", object{"dict": []interface{}{}}},
	}}
	return append(append(part(skeleton), part(entries)...), data...)
}

// part returns a value as JSON, preceded by its length and padded with spaces, so that the next part
// is aligned.
func part(value interface{}) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // the configuration's optimizers are not valid JSON
	}
	for len(text)%8 != 0 {
		text = append(text, ' ')
	}
	head := make([]byte, 8)
	binary.LittleEndian.PutUint64(head, uint64(len(text)))
	return append(head, text...)
}
