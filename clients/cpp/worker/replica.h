// A worker's copy of what is trained: the weights, and the head that they stand at.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "andon/v1/coordinator.pb.h"
#include "worker/digests.h"
#include "worker/round.h"
#include "worker/transfer.h"

namespace andon {

// What a worker trains.
class Model {
 public:
  virtual ~Model() = default;
  // All weights, in the order of the state dict. They are changed in place.
  virtual std::vector<Tensor> parameters() = 0;
  // The mean over samples, one flat vector a block; adds the samples' losses to `loss_sum`.
  virtual std::vector<std::vector<float>> gradient(const std::vector<std::uint64_t>& samples, double& loss_sum) = 0;
  // Moves the weights by the averages of a committed step.
  virtual void apply(const std::vector<std::vector<float>>& averages) = 0;
};

// The head moves by records and transfers alone (rule 7): by commit() and receive().
class Replica {
 public:
  Replica(Model& model, std::string optimizers) : model_(model), optimizers_(std::move(optimizers)) {}

  const std::optional<v1::Key>& head() const { return head_; }
  const v1::Cursor& cursor() const { return cursor_; }
  std::uint64_t step() const { return step_; }
  v1::WeightsDigest digest() const;

  // Whether a record can come next.
  bool follows(const v1::Record& record, std::uint32_t worker) const;
  // Applies a record that follows; `round` has the averages of a STEP.
  void commit(const v1::Record& record, const Round* round);

  // Both ends of a transfer, each with its ticket; if they throw, neither weights nor head moved.
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
  std::string state_;  // as it came, or as it was founded
  Arrived arrived_;
};

}  // namespace andon
