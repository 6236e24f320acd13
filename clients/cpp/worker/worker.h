// One worker on an Andon line. It implements docs/protocol.md.
//
// Theory of operation. The thread of run() owns all state here and takes events from an inbox; the
// streams' threads only put events into it. A session is one Train stream. It is never resumed:
// the worker joins again on a new stream. Only the replica, and a round whose averages are all
// held, outlive a session.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "andon/v1/coordinator.pb.h"
#include "worker/files.h"
#include "worker/model.h"

namespace andon {

class Exchange;
class Replica;
class Session;
struct Round;

// Which line to join, and the worker's model and plan.
struct Config {
  std::string address, run_id, token;
  std::string tls;  // a folder; empty is plaintext
  std::optional<std::uint32_t> slot;
  v1::Layout layout;  // its digest is added
  v1::RunPlan plan;
  // For the state if this worker bootstraps: docs/protocol-data.md, section 18.
  std::string optimizers;
};

// The line refuses this worker; a retry can't succeed.
struct Refused : std::runtime_error {
  using runtime_error::runtime_error;
};

// No coordinator answered within the time limit, or the coordinator dismissed this worker.
struct Lost : std::runtime_error {
  using runtime_error::runtime_error;
};

class Worker {
 public:
  Worker(Config config, Model& model);
  ~Worker();

  // Trains until the run is over; throws Refused or Lost.
  void run();

  std::uint64_t step() const;
  double loss() const { return loss_; }

 private:
  void session();
  void accept(const v1::JoinAccepted& welcome);
  v1::Join join() const;
  void open();
  void see(std::uint64_t term) { greatest_ = std::max(greatest_, term); }
  void ask();
  void abandon_round(const std::string& why);
  bool present(const v1::Key& key) const;
  bool obey(const v1::TrainResponse& message);
  void begin(const v1::ShardAssignment& work);
  void fault(const v1::Fault& fault);
  void lose(const std::string& why);
  void hear(const v1::ReduceResponse& answer, bool corrupt);
  void go_on();
  void ready();
  bool commit(const v1::StepCommitted& message);
  void transfer(const v1::StateTransfer& asked);
  bool leave(const std::string& stop);

  Config config_;
  Model& model_;
  const std::uint64_t incarnation_;
  const std::unique_ptr<Replica> replica_;
  std::uint64_t greatest_ = 0, exchanges_ = 0;
  double loss_ = 0;
  std::optional<v1::Key> asked_;
  std::optional<v1::HaltEvidence> halt_;
  std::optional<v1::JoinAccepted> welcome_;
  std::unique_ptr<Round> round_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace andon
