// Logistic regression without a framework; trains with examples/logistic.py and the other clients.
//
//	ANDON_ADDRESS=127.0.0.1:7070 ANDON_RUN_ID=demo build/logistic -steps 50
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/ioutil"
	"log"
	"math"
	"os"
	"strconv"
	"strings"

	pb "andon/v1"
	"andon/worker"
)

const (
	features, groups = 8, 5
	batch, seed      = 32, 11
	rate             = float32(0.1)
	// One optimizer with one group of two parameters, as examples/logistic.py has it.
	optimizers = `[{"dict": [["state", {"dict": []}],
		["param_groups", [{"dict": [["lr", 0.1], ["params", [0, 1]]]}]]]}]`
)

type sample struct {
	features [features]float32
	group    int
	label    float64
}

// logistic is the log-odds of a label: linear in the features, plus an offset for each group.
type logistic struct {
	data          []sample
	linear, group []float32
}

func (m *logistic) Parameters() []worker.Tensor {
	return []worker.Tensor{
		{Name: "linear.weight", Shape: []uint64{1, features}, Data: m.linear},
		{Name: "group.weight", Shape: []uint64{groups, 1}, Data: m.group},
	}
}

// blocks are the layout's, in sending order: the reverse of the parameters'.
func blocks() []*pb.Block {
	part := func(name string, shape ...uint64) []*pb.Component {
		return []*pb.Component{{Name: name, Shape: shape, Dtype: pb.Dtype_DTYPE_FLOAT32}}
	}
	return []*pb.Block{
		{Kind: pb.BlockKind_BLOCK_KIND_EMBEDDING, Name: "group", Components: part("group.weight", groups, 1)},
		{Kind: pb.BlockKind_BLOCK_KIND_OTHER, Name: "linear.weight", Components: part("linear.weight", 1, features)},
	}
}

func (m *logistic) Gradient(samples []uint64) ([][]float32, float64) {
	var linear [features]float64
	var group [groups]float64
	lossSum := 0.0
	for _, index := range samples {
		one := m.data[index]
		score := float64(m.group[one.group])
		for i, x := range one.features {
			score += float64(m.linear[i]) * float64(x)
		}
		lossSum += math.Max(score, 0) - score*one.label + math.Log1p(math.Exp(-math.Abs(score)))
		fault := 1/(1+math.Exp(-score)) - one.label
		for i, x := range one.features {
			linear[i] += fault * float64(x)
		}
		group[one.group] += fault
	}
	count := float64(len(samples))
	return [][]float32{mean(group[:], count), mean(linear[:], count)}, lossSum
}

func (m *logistic) Sample(index uint64) []byte {
	one := m.data[index]
	return worker.Floats(append(one.features[:], float32(one.group), float32(one.label)))
}

func mean(sums []float64, count float64) []float32 {
	means := make([]float32, len(sums))
	for i, sum := range sums {
		means[i] = float32(sum / count)
	}
	return means
}

func (m *logistic) Apply(averages [][]float32) {
	for i, weights := range [][]float32{m.group, m.linear} {
		for j, average := range averages[i] {
			step := float32(rate * average) // the conversion rounds: nothing is fused
			weights[j] = float32(weights[j] - step)
		}
	}
}

// grainOf is how many samples a grain has if no flag says it.
func grainOf(sameBits string) uint64 {
	if sameBits == "1" {
		return 3
	}
	return 0
}

func load(path string) ([]sample, error) {
	text, err := ioutil.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var data []sample
	for _, line := range strings.Fields(string(text)) {
		var one sample
		for i, part := range strings.Split(line, ",") {
			number, err := strconv.Atoi(part)
			switch {
			case err != nil:
				return nil, err
			case i < features:
				one.features[i] = float32(number) / 16
			case i == features:
				one.group = number
			default:
				one.label = float64(number)
			}
		}
		data = append(data, one)
	}
	return data, nil
}

func run() error {
	steps := flag.Uint64("steps", 50, "steps of the run")
	grain := flag.Uint64("grain", grainOf(os.Getenv("ANDON_SAME_BITS")), "samples of a grain: the same bits on any line; 0: none")
	path := flag.String("data", "clients/data/samples.csv", "the samples")
	flag.Parse()
	data, err := load(*path)
	if err != nil {
		return err
	}
	config := worker.Config{
		Address: os.Getenv("ANDON_ADDRESS"), RunID: os.Getenv("ANDON_RUN_ID"), TLS: os.Getenv("ANDON_TLS_DIR"),
		Blocks: blocks(), Optimizers: optimizers,
		Plan: &pb.RunPlan{GlobalBatch: batch, Seed: seed, Grain: uint32(*grain),
			XDatasetSize: &pb.RunPlan_DatasetSize{DatasetSize: uint64(len(data))},
			XTotalSteps:  &pb.RunPlan_TotalSteps{TotalSteps: *steps}},
	}
	if config.Address == "" {
		return errors.New("ANDON_ADDRESS is not set: start a line with `andon serve`, and name it there")
	}
	if config.Token, err = worker.Token(); err != nil {
		return err
	}
	if slot, err := strconv.ParseUint(os.Getenv("RANK"), 10, 32); err == nil {
		given := uint32(slot)
		config.Slot = &given
	}
	model := &logistic{data: data, linear: make([]float32, features), group: make([]float32, groups)}
	for i := range model.linear {
		model.linear[i] = 0.01 * float32(i+1)
	}
	place := worker.New(config, model)
	if err := place.Run(context.Background()); err != nil {
		return err
	}
	weights := append(worker.Floats(model.linear), worker.Floats(model.group)...)
	report, err := json.Marshal(map[string]interface{}{
		"step": place.Step, "loss": place.Loss, "weights": hex.EncodeToString(weights),
		"digest": hex.EncodeToString(worker.WeightsDigest(model.Parameters())),
	})
	fmt.Println(string(report))
	return err
}

func main() {
	log.SetPrefix("go: ")
	err := run()
	var refused *worker.Refused
	var lost *worker.Lost
	switch {
	case err == nil:
		return
	case errors.As(err, &refused):
		log.Print(err)
		os.Exit(4)
	case errors.As(err, &lost):
		log.Print(err)
		os.Exit(5)
	default:
		log.Fatal(err)
	}
}
