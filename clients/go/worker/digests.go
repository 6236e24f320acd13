package worker

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"

	pb "andon/v1"
)

// Tensor is a parameter of the model. All parameters are float32.
type Tensor struct {
	Name  string
	Shape []uint64
	Data  []float32
}

// Elements returns the number of elements in a shape.
func Elements(shape []uint64) uint64 {
	count := uint64(1)
	for _, size := range shape {
		count *= size
	}
	return count
}

// LayoutDigest returns the SHA-256 that docs/protocol-data.md, section 7 defines.
func LayoutDigest(blocks []*pb.Block) []byte {
	var text strings.Builder
	text.WriteString("andon.layout.v1\n")
	for _, block := range blocks {
		kind := strings.TrimPrefix(block.Kind.String(), "BLOCK_KIND_")
		fmt.Fprintf(&text, "block\t%s\t%s\n", kind, block.Name)
		for _, part := range block.Components {
			dtype := strings.TrimPrefix(part.Dtype.String(), "DTYPE_")
			fmt.Fprintf(&text, "component\t%s\t%s\t%s\n", part.Name, dtype, decimals(part.Shape))
		}
	}
	digest := sha256.Sum256([]byte(text.String()))
	return digest[:]
}

// WeightsDigest returns the SHA-256 that docs/protocol-data.md, section 10 defines, of float32
// parameters.
func WeightsDigest(tensors []Tensor) []byte {
	digest := sha256.New()
	for _, tensor := range tensors {
		addWeights(digest, tensor.Name, "float32", tensor.Shape, Floats(tensor.Data))
	}
	return digest.Sum(nil)
}

func addWeights(digest interface{ Write([]byte) (int, error) }, name, dtype string, shape []uint64, raw []byte) {
	fmt.Fprintf(digest, "%s\x00%s\x00%s\x00", name, dtype, decimals(shape))
	digest.Write(raw)
}

// Floats are numbers in wire order: little-endian, without padding.
func Floats(numbers []float32) []byte {
	raw := make([]byte, 4*len(numbers))
	for i, number := range numbers {
		binary.LittleEndian.PutUint32(raw[4*i:], math.Float32bits(number))
	}
	return raw
}

func readFloats(numbers []float32, raw []byte) {
	for i := range numbers {
		numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
}

func decimals(shape []uint64) string {
	var text bytes.Buffer
	for i, size := range shape {
		if i > 0 {
			text.WriteByte(',')
		}
		text.WriteString(strconv.FormatUint(size, 10))
	}
	return text.String()
}
