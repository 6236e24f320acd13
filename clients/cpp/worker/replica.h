// A worker's copy of the trained weights, and the head that they belong to.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "worker/digests.h"
#include "worker/round.h"
#include "worker/transfer.h"

namespace andon {

// The model that a worker trains.
class Model {
 public:
  virtual ~Model() = default;
  // All parameters, in the order of the state dict. They are modified in place.
  virtual std::vector<Tensor> parameters() = 0;
  // The mean gradient over the samples, as one flat vector for each block. Adds the samples' losses
  // to `loss_sum`.
  virtual std::vector<std::vector<float>> gradient(const std::vector<std::uint64_t>& samples, double& loss_sum) = 0;
  // The bytes that `gradient` reads of one sample: workers compare their hashes.
  virtual std::string sample(std::uint64_t index) = 0;
  // Updates the weights with the averages of a committed step.
  virtual void apply(const std::vector<std::vector<float>>& averages) = 0;
};

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
