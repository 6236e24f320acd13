// A worker's copy of the trained weights, and the head that they belong to.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "worker/digests.h"
#include "worker/model.h"
#include "worker/round.h"
#include "worker/transfer.h"

namespace andon {

// Only records and transfers move the head (rule 7), so only commit() and receive() do.
class Replica {
 public:
  Replica(Model& model, std::string optimizers) : model_(model), optimizers_(std::move(optimizers)) {}

  const std::optional<v1::Key>& head() const { return head_; }
  const v1::Cursor& cursor() const { return cursor_; }
  std::uint64_t step() const { return step_; }
  v1::WeightsDigest digest() const;

  // Whether a record can be applied next.
  bool follows(const v1::Record& record, std::uint32_t worker) const;
  // Applies a record for which follows() is true. For a STEP, `round` holds the averages.
  void commit(const v1::StepCommitted& message, const Round* round);

  // The two ends of a transfer, each with its ticket. If one throws, weights and head are unchanged.
  void give(v1::Reducer::Stub& reducer, const v1::PutStateRequest& first, Watch& watch);
  void receive(v1::Reducer::Stub& reducer, const v1::GetStateRequest& request,
               const v1::StateTransfer& asked, Watch& watch);

 private:
  void stand(const v1::Key& head, const v1::Cursor& cursor, std::uint64_t step);

  Model& model_;
  const std::string optimizers_;
  std::optional<v1::Key> head_;
  v1::Cursor cursor_;
  std::uint64_t step_ = 0;
  std::string state_;  // as received, or as built to bootstrap the line
  Arrived arrived_;
};

}  // namespace andon
