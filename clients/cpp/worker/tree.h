// Grains, and the tree along which they are added: docs/protocol-same-bits.md, sections 31 to 34.
//
// A grain's gradient has the same bits whoever computes it, and the tree depends on the number of
// grains alone. So the mean has the same bits whatever shares the workers have.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.pb.h"

namespace andon {

inline constexpr char kSameBits[] = "same-bits.v1";
inline constexpr std::uint32_t kTreeVersion = 1;

// One flat vector for each block.
using Vectors = std::vector<std::vector<float>>;

// What a worker contributes as one: the mean over its samples, or the sum of a node.
struct Contribution {
  Vectors gradients;
  double weight = 0, loss_sum = 0;
  std::optional<v1::TreeNode> node;  // absent if the plan has no grain
};

// The grains [first, stop) of a batch.
struct Node {
  std::uint64_t first, stop;
};

// The positions of each of some grains.
using Owned = std::map<std::uint64_t, std::vector<std::uint64_t>>;

// The greatest nodes in `node` whose grains are all owned, in rising order.
std::vector<Node> cover(Node node, const Owned& owned);

// Adds up what is below a node; each addition of gradients is rounded to float32. `made` has the nodes
// that are there, and each grain.
Contribution sum(Node node, const std::function<std::optional<Contribution>(Node)>& made);

// Makes a leaf of a grain's mean gradient and its weight: a product, rounded to float32. `grain` is
// the plan's, `count` the number of grains in the batch.
void scale(Contribution& leaf, std::uint32_t grain, std::uint64_t count);

// Makes the mean of a root, whose weights have a sum: a quotient, rounded to float32.
void divide(Contribution& root, double total_weight, std::uint32_t grain, std::uint64_t count);

// Adds 0.0 to the first element of each component: -0.0 there would mean that it is absent.
void mark(Contribution& leaf, const v1::Layout& layout);

// How many grains the batch of an assignment has.
std::uint64_t grains_of(const v1::ShardAssignment& work, std::uint32_t grain);

// The grains of an assignment; absent if it has a part of one.
std::optional<Owned> owned_grains(const v1::ShardAssignment& work, std::uint32_t grain);

// The grains that an assignment verifies; absent if the batch lacks one.
std::optional<Owned> verified_grains(const v1::ShardAssignment& work, std::uint32_t grain);

}  // namespace andon
