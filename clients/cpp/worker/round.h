// One attempt at a step: the share, the chunks and their averages, and the faults found in them.
// Nothing here sends or waits. A fault is returned, and the worker sends it.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.pb.h"
#include "worker/tree.h"
#include "worker/verification.h"

namespace andon {

inline bool same(const v1::Key& one, const v1::Key& other) {
  return one.term() == other.term() && one.round() == other.round();
}

inline bool same(const std::optional<v1::Key>& one, const v1::Key& other) {
  return one.has_value() && same(*one, other);
}

class Model;
class Order;

// The L2 norm of all blocks together, in float64.
double norm(const std::vector<std::vector<float>>& blocks);

// A run of elements of one block, and the reducer that averages it.
struct Chunk {
  int block;
  std::uint64_t offset, count;
  std::string address;
};

// Exists from the assignment until the averages are applied or the round is void.
struct Round {
  v1::ShardAssignment work;
  std::vector<Chunk> chunks;
  std::map<std::pair<std::uint32_t, std::uint64_t>, const Chunk*> waiting;
  std::set<std::string> reducers;
  Vectors averages;  // of the gradients
  std::optional<Verification> verification;  // only if the assignment has `attests`
  std::uint32_t sequence = 0;                // the exchange that is made
  std::vector<Contribution> outgoing;        // what this rank contributes to it
  Vectors incoming;                          // where its averages go
  double weight = -1;                        // their total weight
  std::uint64_t samples = 0;
  std::vector<Contribution> contributions;  // in rising order; none without samples
  double total = -1;
  double busy_s = 0;        // how long the gradients took
  std::uint32_t backwards = 0;  // gradients that were computed
  double own_norm = 0;  // of the gradient, before it was limited
  std::size_t silent = 0;  // reducers that reported that all ranks abstained
  bool held = false;

  bool is(const v1::Key& key) const { return same(work.key(), key); }
  // Divides the blocks into chunks; returns a fault if the map of reducers is invalid.
  std::optional<v1::Fault> cut(const v1::Layout& layout, std::uint64_t size,
                               const google::protobuf::RepeatedPtrField<v1::ReducerShare>& shares);
  // Computes the share: the sums of its nodes if the plan has a grain, else the mean over it, limited
  // to the norm `most`; 0 is no limit. Returns the fault that forbids sending them.
  std::optional<v1::Fault> compute(Model& model, const v1::RunPlan& plan, const v1::Layout& layout, double most);
  // Begins the next exchange, of a sum whose owner sends it to all; false if there is none left, or a
  // fault if the assignment's sums do not make up the batch.
  std::variant<bool, v1::Fault> next(std::uint32_t grain);
  // Stores one average; returns what is wrong if it is invalid, or disagrees with the others (rule 15).
  std::string take(const v1::AveragedBlock& average);
  // The fault of a chunk that was changed on its way from or to a rank.
  v1::Fault corrupt(std::uint32_t rank, std::uint32_t block, std::uint64_t element, const std::string& message) const;
  // The fault that a reducer reports, if it concerns this round.
  std::optional<v1::Fault> told(const v1::ReduceResponse& answer) const;
  bool complete() const { return waiting.empty() || silent == reducers.size(); }
  std::uint64_t largest() const;  // elements of the largest chunk
  // The StepReady of a complete round.
  v1::StepReady report() const;
  // A Fault with this round's key.
  v1::Fault fault(v1::FaultKind kind, const std::string& message) const;

 private:
  void await();
  Contribution gradient(Model& model, const std::vector<std::uint64_t>& indices);
  void compute_nodes(Model& model, const Order& order, const v1::Layout& layout, std::uint32_t grain, const Owned& owned,
                     const Owned& verified);
  void limit(std::vector<std::vector<float>>& gradients, double most);
  std::optional<v1::Fault> check(const Contribution& contribution) const;
};

}  // namespace andon
