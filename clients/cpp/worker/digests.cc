#include "worker/digests.h"

#include <openssl/sha.h>

#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are sent exactly as they are in memory");

namespace andon {

std::string sha256(const std::string& bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return {reinterpret_cast<char*>(digest), sizeof digest};
}

std::uint64_t elements(const v1::Component& component) {
  std::uint64_t count = 1;
  for (const auto size : component.shape()) count *= size;
  return count;
}

std::uint64_t elements(const v1::Block& block) {
  std::uint64_t sum = 0;
  for (const auto& part : block.components()) sum += elements(part);
  return sum;
}

std::string layout_digest(const v1::Layout& layout) {
  std::string text = "andon.layout.v1\n";
  for (const auto& block : layout.blocks()) {
    const std::string kind = v1::BlockKind_Name(block.kind()).substr(sizeof "BLOCK_KIND_" - 1);
    text += "block\t" + kind + "\t" + block.name() + "\n";
    for (const auto& part : block.components()) {
      const std::string dtype = v1::Dtype_Name(part.dtype()).substr(sizeof "DTYPE_" - 1);
      text += "component\t" + part.name() + "\t" + dtype + "\t" + decimals(part.shape()) + "\n";
    }
  }
  return sha256(text);
}

std::string weights_text(const std::string& name, const std::string& dtype,
                         const std::string& shape, const std::string& bytes) {
  std::string text;
  for (const auto& part : {name, dtype, shape}) (text += part) += '\0';
  return text + bytes;
}

std::string weights_digest(const std::vector<Tensor>& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    const std::string bytes = to_bytes(tensor.data->data(), tensor.data->size());
    text += weights_text(tensor.name, "float32", decimals(tensor.shape), bytes);
  }
  return sha256(text);
}

std::string to_bytes(const float* numbers, std::size_t count) {
  return {reinterpret_cast<const char*>(numbers), 4 * count};
}

void from_bytes(float* numbers, const char* bytes, std::size_t count) {
  std::memcpy(numbers, bytes, 4 * count);
}

}  // namespace andon
