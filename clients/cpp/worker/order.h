// The order of an epoch's samples: docs/protocol-data.md, section 8.
#pragma once
#include <array>
#include <cstdint>

namespace andon {

// One output of the SplitMix64 generator.
std::uint64_t splitmix64(std::uint64_t x);

// The permutation of `size` samples (1 to 2^63) for one seed and epoch.
class Order {
 public:
  Order(std::uint64_t seed, std::uint64_t epoch, std::uint64_t size);

  // The index of the sample at a position. The position must be below the size.
  std::uint64_t at(std::uint64_t position) const;

 private:
  std::uint64_t size_, mask_;
  unsigned width_ = 1;
  std::array<std::uint64_t, 8> keys_;
};

}  // namespace andon
