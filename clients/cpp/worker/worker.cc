#include "worker/worker.h"

#include <gnu/libc-version.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <random>
#include <thread>

#include "worker/checks.h"
#include "worker/exchange.h"
#include "worker/replica.h"
#include "worker/round.h"
#include "worker/session.h"

namespace andon {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
// What this client can do beyond the steps of every worker: docs/protocol.md, Capabilities.
constexpr const char* kCapabilities[] = {"balance.v1", "norms.v1", "mean-buffers.v1", "overflow.v1", kSameBits, kVerifies, kTrimmed};
constexpr double kFirstPatienceS = 300, kFirstWaitS = 0.05, kLongestWaitS = 2;

// States what decides the bits of this worker's sums and products, in rising order of names:
// docs/protocol-same-bits.md, section 36. The C library's `exp` uses other instructions on other
// processors.
void state_arithmetic(v1::Join& join) {
  const auto state = [&](const char* name, const std::string& value) {
    auto* item = join.add_arithmetic();
    item->set_name(name);
    item->set_value(value);
  };
  std::string processor = "unknown";
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) processor = line.substr(line.find(": ") + 2);
  state("client", std::string("andon-cpp, compiler ") + __VERSION__ + ", glibc " + gnu_get_libc_version());
  state("processor", processor);
}

void say(const std::string& text) { std::cerr << "cpp: " << text << std::endl; }

// The first message to a reducer; its token shows that this worker is on the line.
template <typename Ticket>
Ticket ticket(const Config& config, const v1::JoinAccepted& welcome) {
  Ticket ticket;
  ticket.set_run_id(config.run_id);
  ticket.set_worker(welcome.worker());
  ticket.set_session_token(welcome.session_token());
  return ticket;
}

}  // namespace

Worker::Worker(Config config, Model& model)
    : config_(std::move(config)), model_(model), incarnation_([] {
        std::random_device random;
        return std::uint64_t{random()} << 32 | random();
      }()), replica_(std::make_unique<Replica>(model, config_.optimizers)) {
  config_.layout.set_digest(layout_digest(config_.layout));
  if (config_.plan.grain() > 0) config_.plan.set_tree(kTreeVersion);
}

Worker::~Worker() = default;

std::uint64_t Worker::step() const { return replica_->step(); }

bool Worker::present(const v1::Key& key) const { return round_ && round_->is(key); }

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
    session_.reset();  // closes the old stream before the next one opens
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

// Joins, then works until the run is over.
void Worker::session() {
  session_ = std::make_unique<Session>(config_.address, config_.tls, join());
  accept(session_->accepted(welcome_.has_value()));
  for (;;) {
    const Event event = session_->inbox->take();
    if (event.control) {
      if (obey(*event.control)) return;
    } else if (event.exchange == 0) {
      refuse(event.status, true);
    } else if (event.exchange != exchange_->number) {
      continue;  // belongs to an exchange that was discarded
    } else if (!event.answer) {
      lose("a reducer's stream ended: " + event.status.error_message());
    } else if (const auto wrong = answer_error(*event.answer); !wrong.empty()) {
      lose(wrong);
    } else {
      hear(*event.answer, event.corrupt);
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
  for (const char* each : kCapabilities) join.add_capabilities(each);
  *join.mutable_layout() = config_.layout;
  *join.mutable_plan() = config_.plan;
  if (config_.plan.grain() > 0) state_arithmetic(join);
  if (replica_->head()) *join.mutable_head() = *replica_->head();
  *join.mutable_cursor() = replica_->cursor();
  join.set_step(replica_->step());
  if (round_ && round_->held) *join.mutable_held_key() = round_->work.key();
  join.set_greatest_term(greatest_);
  if (halt_) *join.mutable_halt() = *halt_;
  join.set_token(config_.token);
  return join;
}

void Worker::accept(const v1::JoinAccepted& welcome) {
  welcome_ = welcome;
  see(welcome.term());
  open();
  asked_.reset();
  halt_.reset();
  if (welcome.has_halt()) halt_ = welcome.halt();
  const bool in_sync = welcome.join_status() == v1::JOIN_STATUS_IN_SYNC;
  if (in_sync && !same(replica_->head(), welcome.head()))
    throw Lost("the coordinator reports this worker in sync with a head that it does not hold");
  if (round_ && (in_sync || !round_->held)) round_.reset();  // the round is void, or its record was never written
  if (in_sync) ask();
}

// Creates a new exchange. It opens its streams to the reducers when they are needed.
void Worker::open() {
  auto opening = ticket<v1::OpenRound>(config_, *welcome_);
  if (config_.plan.grain() > 0) opening.add_capabilities(kSameBits);
  if (welcome_->policy().mean() == v1::MEAN_KIND_TRIMMED) opening.add_capabilities(kTrimmed);
  exchange_ = std::make_unique<Exchange>(++exchanges_, config_.address, config_.tls, opening, session_->inbox);
}

// Requests work, once for each head on a stream.
void Worker::ask() {
  const auto& head = replica_->head();
  if (!head || halt_ || same(asked_, *head)) return;
  asked_ = head;
  *session_->send().mutable_request_work()->mutable_head() = *head;
  session_->flush();
}

// Abandons the current round. Its averages are ignored from now on.
void Worker::abandon_round(const std::string& why) {
  if (!round_) return;
  say("step " + std::to_string(round_->work.step()) + " is tried again: " + why);
  if (!round_->held) open();
  round_.reset();
}

// Handles a message from the coordinator; true once the run is over. Ignores unknown messages.
bool Worker::obey(const v1::TrainResponse& message) {
  const auto wrong = message_error(message);
  if (!wrong.empty()) throw Again("the coordinator sent an invalid message: " + wrong);
  switch (message.message_case()) {
    case v1::TrainResponse::kShardAssignment:
      begin(message.shard_assignment());
      break;
    case v1::TrainResponse::kStepCommitted:
      return commit(message.step_committed());
    case v1::TrainResponse::kRoundVoided:
      if (present(message.round_voided().key())) abandon_round(message.round_voided().message());
      ask();
      break;
    case v1::TrainResponse::kHalt:
      halt_ = message.halt().evidence();
      abandon_round("the line halted");
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
      abandon_round("the run is over");
      return leave(message.shutdown().stop_reason());
    default:
      break;
  }
  return false;
}

// Computes the gradients of the assigned share and sends them.
void Worker::begin(const v1::ShardAssignment& work) {
  abandon_round("a new round was assigned");
  if (!same(replica_->head(), work.parent())) throw Again("assigned work for another head");
  see(work.key().term());
  round_ = std::make_unique<Round>();
  round_->work = work;
  const auto& shares = work.reducers_size() > 0 ? work.reducers() : welcome_->reducers();
  if (const auto wrong = round_->cut(config_.layout, welcome_->policy().chunk_elements(), shares))
    return fault(*wrong);
  if (const auto bad = round_->compute(model_, config_.plan, config_.layout, welcome_->policy().max_grad_norm()))
    return fault(*bad);
  exchange_->send(*round_);
}

// Reports a fault of the current round; the coordinator then voids the round.
void Worker::fault(const v1::Fault& fault) {
  *session_->send().mutable_fault() = fault;
  session_->flush();
}

// Replaces the streams to the reducers. The current round can't complete on this worker, so it is
// reported as a fault: it must not be committed.
void Worker::lose(const std::string& why) {
  if (round_ && !round_->held) fault(round_->fault(v1::FAULT_KIND_DATA_STREAM_LOST, why));
  open();
}

// Handles a reducer's answer for the current round, and forwards its faults.
void Worker::hear(const v1::ReduceResponse& answer, bool corrupt) {
  if (!round_ || round_->held) return;
  if (answer.has_round_opened()) {
    const auto most = answer.round_opened().max_payload_bytes();
    const auto largest = 4 * round_->largest();
    if (most > 0 && most < largest)
      fault(round_->fault(v1::FAULT_KIND_PROTOCOL, "a reducer accepts payloads of " + std::to_string(most) +
                                                       " bytes, and chunks have " + std::to_string(largest)));
    else if (const auto lacks = exchange_->lacks(answer.round_opened()); !lacks.empty())
      fault(round_->fault(v1::FAULT_KIND_PROTOCOL,
                          "a reducer lacks " + lacks + ", so it " +
                              (lacks == kTrimmed ? "makes no trimmed means" : "can't add gradients along the tree of grains") +
                              ": update it"));
  } else if (answer.has_averaged_block() && present(answer.averaged_block().key())) {
    const auto& average = answer.averaged_block();
    if (corrupt)
      return fault(round_->corrupt(round_->work.rank(), average.block(), average.element_offset(),
                                   "an average does not match its CRC-32C: it was changed on its way to this worker"));
    const auto wrong = round_->take(average);
    if (!wrong.empty()) return lose(wrong);
    if (round_->complete()) go_on();
  } else if (const auto found = round_->told(answer)) {
    see(found->greatest().term());  // 0 unless the reducer saw a greater key
    fault(*found);
  }
}

// An exchange is over: makes the next one, or is ready.
void Worker::go_on() {
  const auto next = round_->next(config_.plan.grain());
  if (const auto* wrong = std::get_if<v1::Fault>(&next)) fault(*wrong);
  else if (std::get<bool>(next)) exchange_->send(*round_);
  else ready();
}

// Reports that all averages have arrived. The weights have not moved yet.
void Worker::ready() {
  round_->held = true;
  auto& report = *session_->send().mutable_step_ready();
  report = round_->report();
  const auto every = welcome_->policy().digest_every();
  if (round_->work.wants_digest() || (every > 0 && step() % every == 0)) *report.mutable_digest() = replica_->digest();
  if (welcome_->policy().gradient_norm()) report.set_gradient_norm(norm(round_->averages));
  if (welcome_->policy().own_gradient_norm() && round_->samples > 0) report.set_own_gradient_norm(round_->own_norm);
  session_->flush();
}

// Applies a record: only to its parent, and a STEP only if its averages are held (rule 7).
bool Worker::commit(const v1::StepCommitted& message) {
  const auto& record = message.record();
  const bool is_step = record.kind() == v1::RECORD_KIND_STEP;
  const bool held = present(record.key()) && round_->held;
  if (!replica_->follows(record, welcome_->worker()) || (is_step && !held)) {
    if (same(replica_->head(), record.key())) return false;
    throw Again("the record can't be applied to this worker's head");
  }
  replica_->commit(message, round_.get());
  if (is_step) {
    loss_ = message.loss();
    round_.reset();
  }
  if (!message.stop_reason().empty()) return leave(message.stop_reason());
  ask();
  return false;
}

// Sends or receives state while no round runs, then reports the result (rule 10).
void Worker::transfer(const v1::StateTransfer& asked) {
  std::string failure;
  const auto reducer = v1::Reducer::NewStub(
      open_channel(asked.address().empty() ? config_.address : asked.address(), config_.tls));
  const auto named = [&](auto ticket) {
    ticket.set_transfer_id(asked.transfer_id());
    *ticket.mutable_head() = asked.head();
    return ticket;
  };
  try {
    if (asked.role() == v1::TRANSFER_ROLE_SEND) {
      replica_->give(*reducer, named(ticket<v1::PutStateRequest>(config_, *welcome_)), session_->watch);
    } else {
      replica_->receive(*reducer, named(ticket<v1::GetStateRequest>(config_, *welcome_)), asked, session_->watch);
      round_.reset();
    }
  } catch (const std::exception& error) {
    failure = error.what();
    say("a state transfer failed: " + failure);
  }
  auto& report = *session_->send().mutable_state_report();
  report.set_transfer_id(asked.transfer_id());
  if (replica_->head()) *report.mutable_head() = *replica_->head();
  report.set_failure(failure);
  session_->flush();
  if (failure.empty()) ask();
}

// Leaves the line, and reports the digest of the final weights.
bool Worker::leave(const std::string& stop) {
  auto& leave = *session_->send().mutable_leave();
  leave.set_reason(stop == "drained" ? v1::LEAVE_REASON_DRAINED : v1::LEAVE_REASON_COMPLETE);
  leave.set_final_step(step());
  *leave.mutable_digest() = replica_->digest();
  session_->flush();
  session_->close();
  exchange_.reset();
  session_.reset();
  return true;
}

}  // namespace andon
