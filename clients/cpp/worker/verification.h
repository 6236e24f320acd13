// Verification: in some rounds a worker computes grains of others as well, and says what it has made.
// docs/protocol-same-bits.md, section 37.
//
// It attests hashes of each grain and each node, of its own and of what it verifies. It also makes the
// mean of all sums by itself: of those that it has, and of those that their owners send to all.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "worker/tree.h"

namespace andon {

inline constexpr char kVerifies[] = "verifies.v1";

// XXH3 in its canonical form: 16 and 8 bytes, big-endian.
std::string hash128(const std::string& bytes);
std::string hash64(const std::string& bytes);

// What a worker attests of one round.
class Verification {
 public:
  // The bytes that a gradient reads of one sample.
  using Sample = std::function<std::string(std::uint64_t index)>;

  Verification(const v1::ShardAssignment& work, const v1::Layout& layout, Sample sample);

  // Adds what this worker says of a sum to `list`; `samples` are those of a single grain.
  void attest(std::vector<v1::Attestation>& list, Node node, const Vectors& gradients,
              const std::vector<std::uint64_t>& samples = {}) const;
  // Keeps the nodes that this worker has made, if it is to make the mean.
  void keep(const std::vector<Contribution>& nodes);
  // The vectors of a node that is here.
  const Vectors& sum_of(const v1::NodeOwner& node) const { return sums_.at(span(node)); }
  // A relayed node came.
  void take(const v1::NodeOwner& node, const Vectors& gradients);
  // Compares the averages with the mean of all sums; returns what is wrong with the sums that were
  // assigned, if they do not make up the batch.
  std::string compare(const Vectors& averages, double total_weight, std::uint32_t grain);
  // Fills in what StepReady says of a verified round.
  void report(v1::StepReady& ready, const Vectors& averages) const;

  std::vector<v1::Attestation> own, others;  // of what it contributes, and of what it verifies
  std::vector<v1::NodeOwner> relayed;        // each has an exchange of its own, after that of the gradients

 private:
  using Span = std::pair<std::uint64_t, std::uint64_t>;
  static Span span(const v1::NodeOwner& node) { return {node.first(), node.first() + node.grains()}; }
  std::string component_hashes(const Vectors& gradients) const;

  const v1::ShardAssignment& work_;
  const v1::Layout& layout_;
  const Sample sample_;
  std::map<Span, Vectors> sums_;
  v1::MeanCheck mean_check_;
};

}  // namespace andon
