// One try at a step: the share, the chunks and their averages, and what is wrong with them.
// Nothing here sends or waits: a fault is returned, for the worker to pass on.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.pb.h"

namespace andon {

inline bool same(const v1::Key& one, const v1::Key& other) {
  return one.term() == other.term() && one.round() == other.round();
}

inline bool same(const std::optional<v1::Key>& one, const v1::Key& other) {
  return one.has_value() && same(*one, other);
}

// A run of elements of one block, and the reducer that averages it.
struct Chunk {
  int block;
  std::uint64_t offset, count;
  std::string address;
};

// From its assignment until its averages are applied, or it is void.
struct Round {
  v1::ShardAssignment work;
  std::vector<Chunk> chunks;
  std::map<std::pair<std::uint32_t, std::uint64_t>, const Chunk*> waiting;
  std::set<std::string> reducers;
  std::vector<std::vector<float>> averages;
  std::uint64_t samples = 0;
  double loss_sum = 0, total = -1;
  std::size_t silent = 0;  // reducers that say that everybody abstained
  bool held = false;

  bool is(const v1::Key& key) const { return same(work.key(), key); }
  // Cuts the blocks into chunks; a fault if the map of reducers can't be.
  std::optional<v1::Fault> cut(const v1::Layout& layout, std::uint64_t size,
                               const google::protobuf::RepeatedPtrField<v1::ReducerShare>& shares);
  // The samples of this worker's share, which `samples` counts from now on.
  std::vector<std::uint64_t> share(const v1::RunPlan& plan);
  // Why loss and gradients must not be sent: they are not finite.
  std::optional<v1::Fault> check(const std::vector<std::vector<float>>& gradients) const;
  // Puts one average in its place; what is wrong if it can't be, or disagrees (rule 15).
  std::string take(const v1::AveragedBlock& average);
  // The fault that a reducer tells of, if it is this round's.
  std::optional<v1::Fault> told(const v1::ReduceResponse& answer) const;
  bool complete() const { return waiting.empty() || silent == reducers.size(); }
  std::uint64_t largest() const;  // elements of the largest chunk
  double norm() const;  // of the averages, in float64
  // What the coordinator is told once it is complete.
  v1::StepReady report() const;
  // A defect of this round, with its key.
  v1::Fault fault(v1::FaultKind kind, const std::string& message) const;
};

}  // namespace andon
