// The two digests that all workers must agree on: docs/protocol.md, sections 7 and 10.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "andon/v1/layout.pb.h"

namespace andon {

// A parameter of the model: all of them are float32 here.
struct Tensor {
  std::string name;
  std::vector<std::uint64_t> shape;
  std::vector<float>* data;
};

// SHA-256 of bytes, 32 of them.
std::string sha256(const std::string& bytes);

// How many numbers a block holds.
std::uint64_t elements(const v1::Block& block);

// Dimensions in decimal, divided by commas.
template <typename Shape>
std::string decimals(const Shape& shape) {
  std::string text;
  for (const auto size : shape) text += (text.empty() ? "" : ",") + std::to_string(size);
  return text;
}

std::string layout_digest(const v1::Layout& layout);

// What one parameter adds to the weights' digest.
std::string weights_text(const std::string& name, const std::string& dtype,
                         const std::string& shape, const std::string& bytes);

std::string weights_digest(const std::vector<Tensor>& tensors);

// Numbers as they travel: little-endian, as every processor that this is built for has them.
std::string to_bytes(const float* numbers, std::size_t count);
void from_bytes(float* numbers, const char* bytes, std::size_t count);

}  // namespace andon
