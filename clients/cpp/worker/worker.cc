#include "worker/worker.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iostream>
#include <random>
#include <thread>

#include "worker/order.h"
#include "worker/state.h"

namespace andon {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
constexpr double kFirstPatienceS = 300, kFirstWaitS = 0.05, kLongestWaitS = 2, kLeavePatienceS = 5;

// This stream is of no use any more: join again.
struct Again : std::runtime_error {
  using runtime_error::runtime_error;
};

bool same(const v1::Key& one, const v1::Key& other) {
  return one.term() == other.term() && one.round() == other.round();
}

bool same(const std::optional<v1::Key>& one, const v1::Key& other) {
  return one.has_value() && same(*one, other);
}

void say(const std::string& text) { std::cerr << "cpp: " << text << std::endl; }

Clock::time_point in(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

}  // namespace

// One Train stream: a thread reads it, and one writes what is queued, and heartbeats.
struct Worker::Session {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Coordinator::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> call;
  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>();
  Queue<std::shared_ptr<v1::TrainRequest>> outgoing;  // a null message ends the writing
  Watch watch;
  std::thread reader, writer;

  Session(const Config& config, const v1::Join& join) {
    channel = open_channel(config.address, config.tls);
    stub = v1::Coordinator::NewStub(channel);
    call = stub->Train(&context);
    v1::TrainRequest first;
    *first.mutable_join() = join;
    call->Write(first);
    reader = std::thread([this] {
      auto message = std::make_shared<v1::TrainResponse>();
      for (; call->Read(message.get()); message = std::make_shared<v1::TrainResponse>())
        inbox->put({message, nullptr, 0, {}});
      watch.end();
      inbox->put({nullptr, nullptr, 0, call->Finish()});
    });
  }

  void start_writing(double heartbeat_s) {
    writer = std::thread([this, heartbeat_s] {
      std::uint64_t sequence = 0;
      for (auto beat = in(heartbeat_s);;) {
        std::shared_ptr<v1::TrainRequest> message;
        if (!outgoing.take_until(message, beat)) {
          message = std::make_shared<v1::TrainRequest>();
          message->mutable_heartbeat()->set_sequence(++sequence);
          beat = in(heartbeat_s);
        }
        if (!message) {
          call->WritesDone();
          return;
        }
        if (!call->Write(*message)) return;  // the reader says why
      }
    });
  }

  v1::TrainRequest& send() {
    pending_ = std::make_shared<v1::TrainRequest>();
    return *pending_;
  }
  void flush() { outgoing.put(std::move(pending_)); }

  ~Session() {
    context.TryCancel();
    outgoing.put(nullptr);
    if (writer.joinable()) writer.join();
    reader.join();
  }

 private:
  std::shared_ptr<v1::TrainRequest> pending_;
};

namespace {

// Throws what the end of a control stream means: trying again changes it, or not.
[[noreturn]] void refuse(const grpc::Status& status, bool was_here) {
  switch (status.error_code()) {
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::NOT_FOUND:
    case grpc::StatusCode::UNIMPLEMENTED:
      throw Refused(status.error_message());
    case grpc::StatusCode::ALREADY_EXISTS:
      // A dead process may stand in the way of one that was here before, for a while.
      if (!was_here) throw Refused(status.error_message());
      [[fallthrough]];
    default:
      throw Again("the coordinator was lost (" + status.error_message() + ")");
  }
}

}  // namespace

Worker::Worker(Config config, Model& model)
    : config_(std::move(config)), model_(model), incarnation_([] {
        std::random_device random;
        return std::uint64_t{random()} << 32 | random();
      }()) {
  config_.layout.set_digest(layout_digest(config_.layout));
}

Worker::~Worker() = default;

void Worker::run() {
  std::mt19937 random{std::random_device{}()};
  double wait_s = kFirstWaitS;
  auto began = Clock::now();
  for (;;) {
    const std::uint64_t before = exchanges_;
    std::string why;
    try {
      return session();
    } catch (const Again& again) {
      why = again.what();
    }
    exchange_.reset();
    session_.reset();  // a stream that is of no use is closed before the next one
    if (before != exchanges_) {
      wait_s = kFirstWaitS;
      began = Clock::now();
      say(why + ": joining again");
    }
    const double patience_s = welcome_ ? welcome_->liveness().reconnect_s() : kFirstPatienceS;
    if (Seconds(Clock::now() - began).count() > patience_s)
      throw Lost("nobody answered at " + config_.address + ": " + why);
    std::this_thread::sleep_for(Seconds(wait_s * std::uniform_real_distribution<>(0.5, 1.5)(random)));
    wait_s = std::min(1.5 * wait_s, kLongestWaitS);
  }
}

// Joins, and works until the run is over.
void Worker::session() {
  session_ = std::make_unique<Session>(config_, join());
  const Event first = session_->inbox->take();
  if (!first.control) refuse(first.status, welcome_.has_value());
  if (!first.control->has_join_accepted()) throw Refused("the peer did not answer Join with JoinAccepted");
  accept(first.control->join_accepted());
  for (;;) {
    const Event event = session_->inbox->take();
    if (event.control) {
      if (obey(*event.control)) return;
    } else if (event.exchange == 0) {
      refuse(event.status, true);
    } else if (event.exchange != exchange_->number) {
      continue;  // of a round that is void
    } else if (!event.answer) {
      lose("a reducer's stream ended: " + event.status.error_message());
    } else if (event.answer->message_case() == v1::ReduceResponse::MESSAGE_NOT_SET) {
      lose("a reducer said what this client does not know");
    } else {
      hear(*event.answer);
    }
  }
}

v1::Join Worker::join() const {
  v1::Join join;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  join.set_run_id(config_.run_id);
  join.set_node_id(host);
  if (welcome_) join.set_launch_slot(welcome_->worker());
  else if (config_.slot) join.set_launch_slot(*config_.slot);
  join.set_incarnation(incarnation_);
  join.set_backend("cpu");
  join.set_protocol_version(1);
  auto* device = join.add_devices();
  device->set_kind("cpu");
  device->set_name("cpp");
  *join.mutable_layout() = config_.layout;
  *join.mutable_plan() = config_.plan;
  if (head_) *join.mutable_head() = *head_;
  *join.mutable_cursor() = cursor_;
  join.set_step(step_);
  if (round_ && round_->held) *join.mutable_held_key() = round_->work.key();
  join.set_greatest_term(greatest_);
  if (halt_) *join.mutable_halt() = *halt_;
  join.set_token(config_.token);
  return join;
}

void Worker::accept(const v1::JoinAccepted& welcome) {
  const auto& policy = welcome.policy();
  for (const auto encoding : {policy.encoding(), policy.answer_encoding()})
    if (encoding != v1::ENCODING_FLOAT32 && encoding != v1::ENCODING_UNSPECIFIED)
      throw Refused("this client speaks FLOAT32: serve the line with --encoding float32");
  welcome_ = welcome;
  see(welcome.term());
  session_->start_writing(welcome.liveness().heartbeat_s());
  open();
  asked_.reset();
  halt_.reset();
  if (welcome.has_halt()) halt_ = welcome.halt();
  const bool in_sync = welcome.standing() == v1::STANDING_IN_SYNC;
  if (in_sync && !same(head_, welcome.head()))
    throw Lost("the coordinator calls this worker in sync with a head that it does not have");
  if (round_ && (in_sync || !round_->held)) round_.reset();  // void, or its record was not written
  if (in_sync) ask();
}

// New streams to the reducers, opened when they are needed.
void Worker::open() {
  v1::OpenRound opening;
  opening.set_run_id(config_.run_id);
  opening.set_worker(welcome_->worker());
  opening.set_session_token(welcome_->session_token());
  exchange_ = std::make_unique<Exchange>(++exchanges_, config_.address, config_.tls, opening, session_->inbox);
}

// Asks for work, once a head and stream.
void Worker::ask() {
  if (!head_ || halt_ || same(asked_, *head_)) return;
  asked_ = head_;
  *session_->send().mutable_request_work()->mutable_head() = *head_;
  session_->flush();
}

// Gives the present round up: averages that are still to come are worth nothing.
void Worker::forsake(const std::string& why) {
  if (!round_) return;
  say("step " + std::to_string(round_->work.step()) + " is tried again: " + why);
  if (!round_->held) open();
  round_.reset();
}

bool Worker::present(const v1::Key& key) const { return round_ && same(round_->work.key(), key); }

// Does what the coordinator says; true once the run is over. What is not known is ignored.
bool Worker::obey(const v1::TrainResponse& message) {
  switch (message.message_case()) {
    case v1::TrainResponse::kShardAssignment:
      begin(message.shard_assignment());
      break;
    case v1::TrainResponse::kStepCommitted:
      return commit(message.step_committed());
    case v1::TrainResponse::kRoundVoided:
      if (present(message.round_voided().key())) forsake(message.round_voided().message());
      ask();
      break;
    case v1::TrainResponse::kHalt:
      halt_ = message.halt().evidence();
      forsake("the line halted");
      say("halted: " + halt_->message() + ". No weight moved.");
      break;
    case v1::TrainResponse::kResume:
      halt_.reset();
      say("resumed");
      ask();
      break;
    case v1::TrainResponse::kStateTransfer:
      transfer(message.state_transfer());
      break;
    case v1::TrainResponse::kShutdown:
      if (message.shutdown().stop_reason().empty()) throw Lost(message.shutdown().message());
      forsake("the run is over");
      return leave(message.shutdown().stop_reason());
    default:
      break;
  }
  return false;
}

// Computes a share and sends it.
void Worker::begin(const v1::ShardAssignment& work) {
  forsake("a new round was assigned");
  if (!same(head_, work.parent())) throw Again("assigned work for another head");
  see(work.key().term());
  round_ = std::make_unique<Round>();
  round_->work = work;
  try {
    const auto& shares = work.reducers_size() > 0 ? work.reducers() : welcome_->reducers();
    round_->cut(config_.layout, welcome_->policy().chunk_elements(), shares);
  } catch (const std::runtime_error& error) {
    v1::Fault wrong;
    wrong.set_message(error.what());
    return fault(v1::FAULT_KIND_PROTOCOL, wrong);
  }
  const Order order(config_.plan.seed(), work.epoch(), config_.plan.dataset_size());
  std::vector<std::uint64_t> samples;
  for (const auto& run : work.positions())
    for (auto position = run.start(); position < run.stop(); ++position)
      samples.push_back(order.at(position));
  round_->samples = samples.size();
  std::vector<std::vector<float>> gradients;
  if (!samples.empty()) {
    gradients = model_.gradient(samples, round_->loss_sum);
    if (!sound(gradients)) return;
  }
  exchange_->send(*round_, gradients);
}

// Whether loss and gradients may be sent: they are finite.
bool Worker::sound(const std::vector<std::vector<float>>& gradients) {
  v1::Fault bad;
  bad.set_rank(round_->work.rank());
  if (!std::isfinite(round_->loss_sum)) {
    bad.set_value(std::to_string(round_->loss_sum));
    bad.set_message("the loss is " + bad.value());
    fault(v1::FAULT_KIND_NON_FINITE_LOSS, bad);
    return false;
  }
  for (std::size_t block = 0; block < gradients.size(); ++block) {
    const auto& numbers = gradients[block];
    const auto at = std::find_if(numbers.begin(), numbers.end(), [](float x) { return !std::isfinite(x); });
    if (at == numbers.end()) continue;
    bad.set_block(block);
    bad.set_element(at - numbers.begin());
    bad.set_value(std::to_string(*at));
    bad.set_message("the gradient is not finite");
    fault(v1::FAULT_KIND_NON_FINITE_GRADIENT, bad);
    return false;
  }
  return true;
}

// Tells the coordinator of the present round's defect; it voids the round.
void Worker::fault(v1::FaultKind kind, v1::Fault fault) {
  *fault.mutable_key() = round_->work.key();
  fault.set_kind(kind);
  *session_->send().mutable_fault() = std::move(fault);
  session_->flush();
}

// Goes on with new streams to the reducers: a round that can't be followed must not be committed.
void Worker::lose(const std::string& why) {
  v1::Fault lost;
  lost.set_message(why);
  if (round_ && !round_->held) fault(v1::FAULT_KIND_DATA_STREAM_LOST, lost);
  open();
}

// Takes what a reducer says of the present round, and passes faults on.
void Worker::hear(const v1::ReduceResponse& answer) {
  if (!round_ || round_->held) return;
  v1::Fault found;
  if (answer.has_averaged_block() && present(answer.averaged_block().key())) {
    try {
      round_->take(answer.averaged_block());
    } catch (const std::runtime_error& error) {
      found.set_message(error.what());
      return fault(v1::FAULT_KIND_PROTOCOL, found);
    }
    if (round_->complete()) ready();
  } else if (answer.has_block_fault() && present(answer.block_fault().key())) {
    const auto& bad = answer.block_fault();
    if (bad.has_rank()) found.set_rank(bad.rank());
    found.set_block(bad.block());
    found.set_element(bad.element());
    found.set_value(bad.value());
    found.set_message(bad.message());
    auto kind = v1::FAULT_KIND_PROTOCOL;
    if (bad.kind() == v1::BLOCK_FAULT_KIND_NON_FINITE) kind = v1::FAULT_KIND_NON_FINITE_GRADIENT;
    if (bad.kind() == v1::BLOCK_FAULT_KIND_NON_FINITE_AVERAGE) kind = v1::FAULT_KIND_NON_FINITE_AVERAGE;
    if (bad.kind() == v1::BLOCK_FAULT_KIND_ENCODING_OVERFLOW) kind = v1::FAULT_KIND_ENCODING_OVERFLOW;
    fault(kind, found);
  } else if (answer.has_stale_round() && present(answer.stale_round().key())) {
    see(answer.stale_round().greatest().term());
    *found.mutable_greatest() = answer.stale_round().greatest();
    found.set_message("the reducer saw a greater key");
    fault(v1::FAULT_KIND_STALE_ROUND, found);
  } else if (answer.has_round_aborted() && present(answer.round_aborted().key())) {
    found.set_message(answer.round_aborted().message());
    fault(v1::FAULT_KIND_DATA_STREAM_LOST, found);
  }
}

// Says that all averages are here. The weights have not moved.
void Worker::ready() {
  round_->held = true;
  auto& report = *session_->send().mutable_step_ready();
  *report.mutable_key() = round_->work.key();
  report.set_loss_sum(round_->loss_sum);
  report.set_weight(static_cast<double>(round_->samples));
  report.set_samples(round_->samples);
  report.set_total_weight(round_->total);
  report.set_world_size(round_->work.world_size());
  const auto every = welcome_->policy().digest_every();
  if (every > 0 && step_ % every == 0) *report.mutable_digest() = digest();
  if (welcome_->policy().gradient_norm()) report.set_gradient_norm(round_->norm());
  session_->flush();
}

v1::WeightsDigest Worker::digest() {
  v1::WeightsDigest digest;
  if (head_) *digest.mutable_head() = *head_;
  digest.set_sha256(weights_digest(model_.parameters()));
  return digest;
}

// Applies a record: a STEP only with its averages held, and only to its parent (rule 7).
bool Worker::commit(const v1::StepCommitted& message) {
  const auto& record = message.record();
  const bool is_step = record.kind() == v1::RECORD_KIND_STEP;
  const bool founds = record.kind() == v1::RECORD_KIND_FOUND;
  const bool follows = (founds && !head_) || same(head_, record.parent());
  const bool held = present(record.key()) && round_->held;
  if (!follows || (is_step && !held)) {
    if (same(head_, record.key())) return false;
    throw Again("got a record that can't be applied here");
  }
  if (is_step) {
    if (round_->total > 0) model_.apply(round_->averages);
    loss_ = message.loss();
    round_.reset();
  }
  if (founds && state_.empty()) state_ = found(model_.parameters(), config_.optimizers);
  stand(record.key(), record.cursor(), record.step());
  if (!message.stop_reason().empty()) return leave(message.stop_reason());
  ask();
  return false;
}

void Worker::stand(const v1::Key& head, const v1::Cursor& cursor, std::uint64_t step) {
  head_ = head;
  cursor_ = cursor;
  step_ = step;
}

// Sends or receives state, while no round runs, and says how it ended (rule 10).
void Worker::transfer(const v1::StateTransfer& asked) {
  std::string failure;
  const auto reducer = v1::Reducer::NewStub(
      open_channel(asked.address().empty() ? config_.address : asked.address(), config_.tls));
  const auto show = [&](auto& ticket) {
    ticket.set_run_id(config_.run_id);
    ticket.set_worker(welcome_->worker());
    ticket.set_session_token(welcome_->session_token());
    ticket.set_transfer_id(asked.transfer_id());
    *ticket.mutable_head() = asked.head();
  };
  try {
    if (asked.role() == v1::TRANSFER_ROLE_SEND) {
      if (!same(head_, asked.head()))
        throw std::runtime_error("this worker is not at the head that the transfer names");
      patch(state_, model_.parameters());
      v1::PutStateRequest first;
      show(first);
      give(*reducer, first, state_, session_->watch);
    } else {
      v1::GetStateRequest request;
      show(request);
      std::string state = arrived_.receive(*reducer, request, session_->watch);
      install(state, model_.parameters());
      state_ = std::move(state);
      round_.reset();
      stand(asked.head(), asked.cursor(), asked.step());
    }
  } catch (const std::exception& error) {
    failure = error.what();
    say("a state transfer failed: " + failure);
  }
  auto& report = *session_->send().mutable_state_report();
  report.set_transfer_id(asked.transfer_id());
  if (head_) *report.mutable_head() = *head_;
  report.set_failure(failure);
  session_->flush();
  if (failure.empty()) ask();
}

// Says good-bye, with the digest of the final weights.
bool Worker::leave(const std::string& stop) {
  auto& leave = *session_->send().mutable_leave();
  leave.set_reason(stop == "drained" ? v1::LEAVE_REASON_DRAINED : v1::LEAVE_REASON_COMPLETE);
  leave.set_final_step(step_);
  *leave.mutable_digest() = digest();
  session_->flush();
  session_->outgoing.put(nullptr);
  const auto deadline = in(kLeavePatienceS);
  Event event;
  while (session_->inbox->take_until(event, deadline) && (event.control || event.exchange != 0)) {
  }
  exchange_.reset();
  session_.reset();
  return true;
}

}  // namespace andon
