#include "worker/session.h"

#include <chrono>

#include "worker/checks.h"
#include "worker/worker.h"

namespace andon {
namespace {

constexpr double kClosePatienceS = 5;

std::chrono::steady_clock::time_point in(double seconds) {
  using Clock = std::chrono::steady_clock;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

void refuse(const grpc::Status& status, bool was_here) {
  switch (status.error_code()) {
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::NOT_FOUND:
    case grpc::StatusCode::UNIMPLEMENTED:
      throw Refused(status.error_message());
    case grpc::StatusCode::ALREADY_EXISTS:
      // After a reconnect, the coordinator may still hold the slot for this worker's dead stream.
      if (!was_here) throw Refused(status.error_message());
      [[fallthrough]];
    default:
      throw Again("the coordinator was lost (" + status.error_message() + ")");
  }
}

Session::Session(const std::string& address, const std::string& tls, const v1::Join& join) {
  channel_ = open_channel(address, tls);
  stub_ = v1::Coordinator::NewStub(channel_);
  call_ = stub_->Train(&context_);
  v1::TrainRequest first;
  *first.mutable_join() = join;
  call_->Write(first);
  reader_ = std::thread([this] {
    auto message = std::make_shared<v1::TrainResponse>();
    for (; call_->Read(message.get()); message = std::make_shared<v1::TrainResponse>())
      inbox->put({message, nullptr, 0, {}});
    watch.end();
    inbox->put({nullptr, nullptr, 0, finish(*call_, context_)});
  });
}

Session::~Session() {
  context_.TryCancel();
  outgoing_.put(nullptr);
  if (writer_.joinable()) writer_.join();
  reader_.join();
}

v1::JoinAccepted Session::accepted(bool was_here) {
  const Event first = inbox->take();
  if (!first.control) refuse(first.status, was_here);
  if (!first.control->has_join_accepted()) throw Refused("the coordinator did not answer Join with JoinAccepted");
  const auto& welcome = first.control->join_accepted();
  const auto why = unsupported_line(welcome);
  if (!why.empty()) throw Refused(why);
  start_writing(welcome.liveness().heartbeat_s());
  return welcome;
}

void Session::start_writing(double heartbeat_s) {
  writer_ = std::thread([this, heartbeat_s] {
    std::uint64_t sequence = 0;
    for (auto beat = in(heartbeat_s);;) {
      std::shared_ptr<v1::TrainRequest> message;
      if (!outgoing_.take_until(message, beat)) {
        message = std::make_shared<v1::TrainRequest>();
        message->mutable_heartbeat()->set_sequence(++sequence);
        beat = in(heartbeat_s);
      }
      if (!message) {
        call_->WritesDone();
        return;
      }
      if (!call_->Write(*message)) return;  // the reading thread reports the status
    }
  });
}

v1::TrainRequest& Session::send() {
  pending_ = std::make_shared<v1::TrainRequest>();
  return *pending_;
}

void Session::close() {
  outgoing_.put(nullptr);
  const auto deadline = in(kClosePatienceS);
  Event event;
  while (inbox->take_until(event, deadline) && (event.control || event.exchange != 0)) {
  }
}

}  // namespace andon
