#include "worker/tree.h"

#include <algorithm>

#include "worker/digests.h"

namespace andon {
namespace {

// Of a node of several grains. The left child has the greatest power of two of grains that is less
// than all of them.
std::pair<Node, Node> children(Node node) {
  std::uint64_t size = 1;
  while (2 * size < node.stop - node.first) size *= 2;
  return {{node.first, node.first + size}, {node.first + size, node.stop}};
}

}  // namespace

std::vector<Node> cover(Node node, const Owned& owned) {
  if (owned.empty()) return {};
  bool whole = true;
  for (auto grain = node.first; whole && grain < node.stop; ++grain) whole = owned.count(grain) > 0;
  if (whole) return {node};
  if (node.stop - node.first == 1) return {};
  const auto [left, right] = children(node);
  auto nodes = cover(left, owned);
  for (const auto& each : cover(right, owned)) nodes.push_back(each);
  return nodes;
}

Contribution sum(Node node, const std::function<std::optional<Contribution>(Node)>& made) {
  if (auto there = made(node)) return *std::move(there);
  const auto [left, right] = children(node);
  auto total = sum(left, made);
  const auto more = sum(right, made);
  total.weight += more.weight;
  total.loss_sum += more.loss_sum;
  for (std::size_t block = 0; block < more.gradients.size(); ++block)
    for (std::size_t i = 0; i < more.gradients[block].size(); ++i)
      total.gradients[block][i] += more.gradients[block][i];
  return total;
}

void scale(Contribution& leaf, std::uint32_t grain, std::uint64_t count) {
  const float factor = count == 1 ? 1 : static_cast<float>(leaf.weight / grain);
  for (auto& numbers : leaf.gradients)
    for (auto& number : numbers) number *= factor;
}

void divide(Contribution& root, double total_weight, std::uint32_t grain, std::uint64_t count) {
  const float divisor = count == 1 ? 1 : static_cast<float>(total_weight / grain);
  for (auto& numbers : root.gradients)
    for (auto& number : numbers) number = total_weight == 0 ? 0 : number / divisor;
}

void mark(Contribution& leaf, const v1::Layout& layout) {
  for (int block = 0; block < layout.blocks_size(); ++block) {
    std::uint64_t at = 0;
    for (const auto& component : layout.blocks(block).components()) {
      const auto size = elements(component);
      if (size > 0) leaf.gradients[block][at] += 0.0f;
      at += size;
    }
  }
}

std::uint64_t grains_of(const v1::ShardAssignment& work, std::uint32_t grain) {
  return (work.batch().stop() - work.batch().start() + grain - 1) / grain;
}

std::optional<Owned> owned_grains(const v1::ShardAssignment& work, std::uint32_t grain) {
  const auto start = work.batch().start(), stop = work.batch().stop();
  Owned owned;
  for (const auto& run : work.positions())
    for (auto position = run.start(); position < run.stop(); ++position) {
      if (position < start || position >= stop) return {};
      owned[(position - start) / grain].push_back(position);
    }
  for (const auto& [index, positions] : owned)
    if (positions.size() != std::min<std::uint64_t>(grain, stop - start - index * grain)) return {};
  return owned;
}

std::optional<Owned> verified_grains(const v1::ShardAssignment& work, std::uint32_t grain) {
  const auto start = work.batch().start(), stop = work.batch().stop();
  Owned verified;
  for (const std::uint64_t index : work.verifies()) {
    const auto begin = start + index * grain, end = std::min(begin + grain, stop);
    if (begin >= stop) return {};
    for (auto position = begin; position < end; ++position) verified[index].push_back(position);
  }
  return verified;
}

}  // namespace andon
