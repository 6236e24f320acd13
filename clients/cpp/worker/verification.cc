#include "worker/verification.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "worker/digests.h"

namespace andon {
namespace {

// Of a batch of more positions, the samples of a grain have one hash.
constexpr std::uint64_t kMaxHashedSamples = 32768;

std::string bytes_of(const std::vector<float>& numbers) { return to_bytes(numbers.data(), numbers.size()); }

std::string block_digest(const Vectors& blocks) {
  std::string hashes;
  for (const auto& numbers : blocks) hashes += hash128(bytes_of(numbers));
  return hash128(hashes);
}

// Names the first element whose bits differ.
void name_apart(const Vectors& expected, const Vectors& came, v1::MeanCheck& check) {
  for (std::size_t block = 0; block < expected.size(); ++block)
    for (std::size_t element = 0; element < expected[block].size(); ++element) {
      const float &made = expected[block][element], &other = came[block][element];
      if (std::memcmp(&made, &other, sizeof made) == 0) continue;
      auto& apart = *check.mutable_apart();
      apart.set_block(block);
      apart.set_element(element);
      apart.set_expected(made);
      apart.set_came(other);
      return;
    }
}

}  // namespace

std::string hash128(const std::string& bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  return {reinterpret_cast<const char*>(canonical.digest), sizeof canonical.digest};
}

std::string hash64(const std::string& bytes) {
  XXH64_canonical_t canonical;
  XXH64_canonicalFromHash(&canonical, XXH3_64bits(bytes.data(), bytes.size()));
  return {reinterpret_cast<const char*>(canonical.digest), sizeof canonical.digest};
}

Verification::Verification(const v1::ShardAssignment& work, const v1::Layout& layout, Sample sample)
    : work_(work), layout_(layout), sample_(std::move(sample)) {
  for (const auto& each : work.sums())
    if (each.relayed()) relayed.push_back(each);
}

// The hashes of a sum's components, one behind another. A component that is absent, and begins with
// -0.0, has the hash of no bytes.
std::string Verification::component_hashes(const Vectors& gradients) const {
  std::string hashes;
  for (int block = 0; block < layout_.blocks_size(); ++block) {
    const float* at = gradients[block].data();
    for (const auto& component : layout_.blocks(block).components()) {
      const auto size = elements(component);
      const bool absent = size > 0 && *at == 0 && std::signbit(*at);
      hashes += hash128(absent ? "" : to_bytes(at, size));
      at += size;
    }
  }
  return hashes;
}

void Verification::attest(std::vector<v1::Attestation>& list, Node node, const Vectors& gradients,
                          const std::vector<std::uint64_t>& samples) const {
  const std::string hashes = component_hashes(gradients);
  auto& attested = list.emplace_back();
  attested.set_first(node.first);
  attested.set_grains(node.stop - node.first);
  attested.set_digest(hash128(hashes));
  if (node.stop - node.first > 1) return;
  std::string known;
  for (const auto index : samples) known += hash64(sample_(index));
  const bool many = work_.batch().stop() - work_.batch().start() > kMaxHashedSamples;
  attested.set_samples(many ? hash64(known) : known);
  const auto& verifies = work_.verifies();
  if (work_.itemised() && std::count(verifies.begin(), verifies.end(), node.first) > 0) attested.set_components(hashes);
}

void Verification::keep(const std::vector<Contribution>& nodes) {
  if (work_.sums_size() == 0) return;
  for (const auto& each : nodes) sums_[{each.node->first(), each.node->first() + each.node->grains()}] = each.gradients;
}

void Verification::take(const v1::NodeOwner& node, const Vectors& gradients) {
  mean_check_.add_relayed(hash128(component_hashes(gradients)));
  sums_[span(node)] = gradients;
}

std::string Verification::compare(const Vectors& averages, double total_weight, std::uint32_t grain) {
  if (work_.sums_size() == 0) return {};
  std::string wrong;
  const auto count = grains_of(work_, grain);
  auto mean = sum({0, count}, [&](Node node) -> std::optional<Contribution> {
    const auto there = sums_.find({node.first, node.stop});
    if (there != sums_.end()) return Contribution{there->second, 0, 0, {}};
    if (node.stop - node.first > 1) return {};
    wrong = "nobody has a sum of grain " + std::to_string(node.first);
    return Contribution{averages, 0, 0, {}};
  });
  divide(mean, total_weight, grain, count);
  mean_check_.set_expected(block_digest(mean.gradients));
  mean_check_.set_came(block_digest(averages));
  name_apart(mean.gradients, averages, mean_check_);
  return wrong;
}

void Verification::report(v1::StepReady& ready, const Vectors& averages) const {
  for (const auto* list : {&own, &others})
    for (const auto& each : *list) *ready.add_attested() = each;
  ready.set_averages_digest(hash128(component_hashes(averages)));
  if (work_.sums_size() > 0) *ready.mutable_mean_check() = mean_check_;
}

}  // namespace andon
