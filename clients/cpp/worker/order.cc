#include "worker/order.h"

#include <utility>

namespace andon {

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

std::uint64_t splitmix64(std::uint64_t x) {
  std::uint64_t z = x + kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

Order::Order(std::uint64_t seed, std::uint64_t epoch, std::uint64_t size) : size_(size) {
  while (width_ < 32 && std::uint64_t{1} << (2 * width_) < size) ++width_;
  mask_ = (std::uint64_t{1} << width_) - 1;
  const std::uint64_t key = splitmix64(splitmix64(seed) + epoch);
  for (std::uint64_t i = 0; i < keys_.size(); ++i) keys_[i] = splitmix64(key + i * kGolden);
}

std::uint64_t Order::at(std::uint64_t position) const {
  std::uint64_t x = position;
  do {
    std::uint64_t left = x >> width_, right = x & mask_;
    for (const std::uint64_t key : keys_) {
      left ^= splitmix64(right ^ key) & mask_;
      std::swap(left, right);
    }
    x = (left << width_) | right;
  } while (x >= size_);
  return x;
}

}  // namespace andon
