// The two digests that all workers must agree on: docs/protocol-data.md, sections 7 and 10.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "andon/v1/layout.pb.h"

namespace andon {

// A parameter of the model. All parameters are float32.
struct Tensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<float>* data;
};

// The SHA-256 of some bytes: 32 bytes.
std::string sha256(const std::string& bytes);

// The number of elements.
std::uint64_t elements(const v1::Component& component);
std::uint64_t elements(const v1::Block& block);

// Dimensions in decimal, separated by commas.
template <typename Shape>
std::string decimals(const Shape& shape) {
  std::string text;
  for (const auto size : shape) text += (text.empty() ? "" : ",") + std::to_string(size);
  return text;
}

std::string layout_digest(const v1::Layout& layout);

// The bytes that one parameter contributes to the weights' digest.
std::string weights_text(const std::string& name, const std::string& dtype,
                         const std::string& shape, const std::string& bytes);

std::string weights_digest(const std::vector<Tensor>& tensors);

// Numbers in wire order: little-endian, like every processor that this client is built for.
std::string to_bytes(const float* numbers, std::size_t count);
void from_bytes(float* numbers, const char* bytes, std::size_t count);

}  // namespace andon
