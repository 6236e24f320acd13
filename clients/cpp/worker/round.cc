#include "worker/round.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "worker/digests.h"
#include "worker/order.h"
#include "worker/model.h"

namespace andon {
namespace {

v1::FaultKind kind_of(v1::BlockFaultKind kind) {
  if (kind == v1::BLOCK_FAULT_KIND_NON_FINITE) return v1::FAULT_KIND_NON_FINITE_GRADIENT;
  if (kind == v1::BLOCK_FAULT_KIND_NON_FINITE_AVERAGE) return v1::FAULT_KIND_NON_FINITE_AVERAGE;
  if (kind == v1::BLOCK_FAULT_KIND_ENCODING_OVERFLOW) return v1::FAULT_KIND_ENCODING_OVERFLOW;
  return v1::FAULT_KIND_PROTOCOL;
}

}  // namespace

std::optional<v1::Fault> Round::cut(const v1::Layout& layout, std::uint64_t size,
                                    const google::protobuf::RepeatedPtrField<v1::ReducerShare>& shares) {
  std::uint64_t flat = 0;
  for (int block = 0; block < layout.blocks_size(); ++block) {
    const std::uint64_t whole = elements(layout.blocks(block));
    for (std::uint64_t offset = 0; offset < whole; offset += size) {
      const std::uint64_t count = std::min(size, whole - offset), begin = flat + offset;
      const auto share = std::find_if(shares.begin(), shares.end(), [&](const auto& each) {
        return each.start_element() <= begin && begin + count <= each.stop_element();
      });
      if (share == shares.end())
        return fault(v1::FAULT_KIND_PROTOCOL, "the map of reducers does not cover block " + std::to_string(block));
      chunks.push_back({block, offset, count, share->address()});
      reducers.insert(share->address());
    }
    flat += whole;
    averages.emplace_back(whole);
  }
  incoming = averages;
  await();
  return {};
}

// All averages of an exchange are still to come.
void Round::await() {
  for (const auto& chunk : chunks) waiting[{chunk.block, chunk.offset}] = &chunk;
  silent = 0;
  weight = -1;
}

std::variant<bool, v1::Fault> Round::next(std::uint32_t grain) {
  if (sequence == 0) {
    averages = incoming;
    total = weight;
  } else {
    verification->take(verification->relayed[sequence - 1], incoming);
  }
  if (!verification) return false;
  if (sequence == verification->relayed.size()) {
    const auto wrong = verification->compare(averages, total, grain);
    if (!wrong.empty()) return fault(v1::FAULT_KIND_PROTOCOL, wrong);
    return false;
  }
  const auto& relayed = verification->relayed[sequence++];
  outgoing.clear();
  if (relayed.rank() == work.rank()) outgoing.push_back({verification->sum_of(relayed), 1, 0, {}});
  await();
  return true;
}

Contribution Round::gradient(Model& model, const std::vector<std::uint64_t>& indices) {
  samples += indices.size();
  ++backwards;
  Contribution mean;
  mean.weight = static_cast<double>(indices.size());
  const auto began = std::chrono::steady_clock::now();
  mean.gradients = model.gradient(indices, mean.loss_sum);
  busy_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return mean;
}

std::optional<v1::Fault> Round::compute(Model& model, const v1::RunPlan& plan, const v1::Layout& layout, double most) {
  const Order order(plan.seed(), work.epoch(), plan.dataset_size());
  if (plan.grain() == 0) {
    std::vector<std::uint64_t> share;
    for (const auto& run : work.positions())
      for (auto position = run.start(); position < run.stop(); ++position) share.push_back(position);
    if (share.empty()) return {};
    for (auto& position : share) position = order.at(position);
    contributions.push_back(gradient(model, share));
    limit(contributions.back().gradients, most);
  } else {
    const auto owned = owned_grains(work, plan.grain()), verified = verified_grains(work, plan.grain());
    if (!owned || !verified) return fault(v1::FAULT_KIND_PROTOCOL, "assigned positions that are not whole grains of the batch");
    compute_nodes(model, order, layout, plan.grain(), *owned, *verified);
  }
  for (const auto& each : contributions)
    if (const auto bad = check(each)) return bad;
  outgoing = contributions;
  return {};
}

// Computes each grain of the share by itself, and adds up its maximal nodes. In a verified round it does
// so with other workers' grains first; nothing of those is contributed or counted.
void Round::compute_nodes(Model& model, const Order& order, const v1::Layout& layout, std::uint32_t grain,
                          const Owned& owned, const Owned& verified) {
  const auto count = grains_of(work, grain);
  const auto nodes = [&](const Owned& grains, const auto& gradient_of, std::vector<v1::Attestation>* attested) {
    std::vector<Contribution> sums;
    for (const auto& each : cover({0, count}, grains)) {
      sums.push_back(sum(each, [&](Node node) -> std::optional<Contribution> {
        if (node.stop - node.first > 1) return {};
        auto indices = grains.at(node.first);
        for (auto& index : indices) index = order.at(index);
        auto leaf = gradient_of(indices);
        scale(leaf, grain, count);
        mark(leaf, layout);
        if (attested) verification->attest(*attested, node, leaf.gradients, indices);  // before an addition changes it
        return leaf;
      }));
      if (attested && each.stop - each.first > 1) verification->attest(*attested, each, sums.back().gradients);
      auto& node = sums.back().node.emplace();
      node.set_first(each.first);
      node.set_grains(each.stop - each.first);
      node.set_batch_grains(count);
      node.set_grain(grain);
    }
    return sums;
  };
  if (work.attests()) {
    verification.emplace(work, layout, [&model](std::uint64_t index) { return model.sample(index); });
    const auto uncounted = [&](const std::vector<std::uint64_t>& indices) {
      Contribution leaf;
      leaf.weight = static_cast<double>(indices.size());
      leaf.gradients = model.gradient(indices, leaf.loss_sum);
      return leaf;
    };
    verification->keep(nodes(verified, uncounted, &verification->others));
  }
  const auto counted = [&](const std::vector<std::uint64_t>& indices) { return gradient(model, indices); };
  contributions = nodes(owned, counted, verification ? &verification->own : nullptr);
  if (verification) verification->keep(contributions);
}

std::optional<v1::Fault> Round::check(const Contribution& contribution) const {
  const auto& [gradients, weight, loss_sum, node] = contribution;
  if (!std::isfinite(loss_sum)) {
    const std::string value = std::to_string(loss_sum);
    auto bad = fault(v1::FAULT_KIND_NON_FINITE_LOSS, "the loss is " + value);
    bad.set_rank(work.rank());
    bad.set_value(value);
    return bad;
  }
  for (std::size_t block = 0; block < gradients.size(); ++block) {
    const auto& numbers = gradients[block];
    const auto at = std::find_if(numbers.begin(), numbers.end(), [](float x) { return !std::isfinite(x); });
    if (at == numbers.end()) continue;
    auto bad = fault(v1::FAULT_KIND_NON_FINITE_GRADIENT, "the gradient is not finite");
    bad.set_rank(work.rank());
    bad.set_block(block);
    bad.set_element(at - numbers.begin());
    bad.set_value(std::to_string(*at));
    return bad;
  }
  return {};
}

std::string Round::take(const v1::AveragedBlock& average) {
  if (average.group() != 0 || average.sequence() != sequence) return "an average belongs to another exchange";
  if (average.world_size() != work.world_size()) return "an average has another world_size than the round";
  if (weight >= 0 && average.total_weight() != weight) return "averages have different total weights";
  weight = average.total_weight();
  if (weight == 0 && average.element_count() == 0) {
    ++silent;
    return {};
  }
  const auto found = waiting.find({average.block(), average.element_offset()});
  if (found == waiting.end() || average.element_count() != found->second->count ||
      average.payload().size() != 4 * found->second->count ||
      average.encoding() != v1::ENCODING_FLOAT32)
    return "an average is not one that this round awaits";
  const Chunk& chunk = *found->second;
  from_bytes(incoming[chunk.block].data() + chunk.offset, average.payload().data(), chunk.count);
  waiting.erase(found);
  return {};
}

std::optional<v1::Fault> Round::told(const v1::ReduceResponse& answer) const {
  if (answer.has_block_fault() && is(answer.block_fault().key())) {
    const auto& bad = answer.block_fault();
    auto found = fault(kind_of(bad.kind()), bad.message());
    if (bad.has_rank()) found.set_rank(bad.rank());
    found.set_block(bad.block());
    found.set_element(bad.element());
    found.set_value(bad.value());
    return found;
  }
  if (answer.has_stale_round() && is(answer.stale_round().key())) {
    auto found = fault(v1::FAULT_KIND_STALE_ROUND, "the reducer has seen a greater key");
    *found.mutable_greatest() = answer.stale_round().greatest();
    return found;
  }
  if (answer.has_round_aborted() && is(answer.round_aborted().key())) {
    const auto& aborted = answer.round_aborted();
    const auto& chunk = aborted.corrupt();
    if (aborted.has_corrupt()) return corrupt(chunk.rank(), chunk.block(), chunk.element(), aborted.message());
    return fault(v1::FAULT_KIND_DATA_STREAM_LOST, aborted.message());
  }
  return {};
}

v1::Fault Round::corrupt(std::uint32_t rank, std::uint32_t block, std::uint64_t element,
                         const std::string& message) const {
  auto found = fault(v1::FAULT_KIND_CORRUPT_CHUNK, message);
  found.set_rank(rank);
  found.set_block(block);
  found.set_element(element);
  return found;
}

std::uint64_t Round::largest() const {
  std::uint64_t most = 0;
  for (const auto& chunk : chunks) most = std::max(most, chunk.count);
  return most;
}

double norm(const std::vector<std::vector<float>>& blocks) {
  double sum = 0;
  for (const auto& block : blocks)
    for (const double number : block) sum += number * number;
  return std::sqrt(sum);
}

void Round::limit(std::vector<std::vector<float>>& gradients, double most) {
  own_norm = norm(gradients);
  // A norm that is not finite stays, so that the value is found.
  if (most <= 0 || !(own_norm > most) || !std::isfinite(own_norm)) return;
  for (auto& block : gradients)
    for (auto& number : block) number = static_cast<float>(number * (most / own_norm));
}

v1::StepReady Round::report() const {
  v1::StepReady report;
  *report.mutable_key() = work.key();
  for (const auto& each : contributions) {
    report.set_weight(report.weight() + each.weight);
    report.set_loss_sum(report.loss_sum() + each.loss_sum);
    if (!each.node) continue;
    auto& node = *report.add_node_losses();
    node.set_first(each.node->first());
    node.set_grains(each.node->grains());
    node.set_weight(each.weight);
    node.set_loss_sum(each.loss_sum);
  }
  report.set_samples(samples);
  report.set_total_weight(total);
  report.set_world_size(work.world_size());
  // Nothing is kept of an earlier attempt: what is in the share was computed now.
  auto& timings = *report.mutable_timings();
  timings.set_busy_s(busy_s);
  timings.set_micro_batches(backwards);
  timings.set_computed(samples);
  if (verification) verification->report(report, averages);
  return report;
}

v1::Fault Round::fault(v1::FaultKind kind, const std::string& message) const {
  v1::Fault fault;
  *fault.mutable_key() = work.key();
  fault.set_kind(kind);
  fault.set_message(message);
  return fault;
}

}  // namespace andon
