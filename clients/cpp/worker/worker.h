// One worker's place on an Andon line; it speaks docs/protocol.md.
//
// Theory of operation. One thread, run()'s, owns everything here and takes events from an inbox; the
// streams' threads only put events there. A session is one Train stream: it is never resumed, the
// worker joins again on a new one. The head moves by records and transfers alone (rule 7).
#pragma once
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "andon/v1/coordinator.grpc.pb.h"
#include "worker/digests.h"
#include "worker/exchange.h"
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

// Which line, and what the worker brings to it.
struct Config {
  std::string address, run_id, token;
  std::string tls;  // a folder; empty is plaintext
  std::optional<std::uint32_t> slot;
  v1::Layout layout;  // its digest is added
  v1::RunPlan plan;
  std::string optimizers;  // what a founder says of its optimizers: docs/protocol.md, section 11
};

// The line does not take this worker: trying again is no use.
struct Refused : std::runtime_error {
  using runtime_error::runtime_error;
};

// No coordinator answered for as long as is worth waiting, or it sent this worker away.
struct Lost : std::runtime_error {
  using runtime_error::runtime_error;
};

class Worker {
 public:
  Worker(Config config, Model& model);
  ~Worker();

  // Trains until the run is over; throws Refused or Lost.
  void run();

  std::uint64_t step() const { return step_; }
  double loss() const { return loss_; }

 private:
  struct Session;

  void session();
  void accept(const v1::JoinAccepted& welcome);
  v1::Join join() const;
  void open();
  void see(std::uint64_t term) { greatest_ = std::max(greatest_, term); }
  void ask();
  void forsake(const std::string& why);
  bool present(const v1::Key& key) const;
  bool obey(const v1::TrainResponse& message);
  void begin(const v1::ShardAssignment& work);
  bool sound(const std::vector<std::vector<float>>& gradients);
  void fault(v1::FaultKind kind, v1::Fault fault);
  void lose(const std::string& why);
  void hear(const v1::ReduceResponse& answer);
  void ready();
  bool commit(const v1::StepCommitted& message);
  void stand(const v1::Key& head, const v1::Cursor& cursor, std::uint64_t step);
  void transfer(const v1::StateTransfer& asked);
  bool leave(const std::string& stop);
  v1::WeightsDigest digest();

  Config config_;
  Model& model_;
  const std::uint64_t incarnation_;
  std::uint64_t step_ = 0, greatest_ = 0, exchanges_ = 0;
  double loss_ = 0;
  std::optional<v1::Key> head_, asked_;
  v1::Cursor cursor_;
  std::optional<v1::HaltEvidence> halt_;
  std::optional<v1::JoinAccepted> welcome_;
  std::unique_ptr<Round> round_;
  std::string state_;  // as it came, or as it was founded
  Arrived arrived_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace andon
