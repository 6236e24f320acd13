#include "worker/exchange.h"

#include <algorithm>
#include <future>
#include <set>

#include "worker/checksums.h"
#include "worker/digests.h"

namespace andon {
namespace {

bool names(const google::protobuf::RepeatedPtrField<std::string>& all, const std::string& capability) {
  return std::find(all.begin(), all.end(), capability) != all.end();
}

}  // namespace

// One Reduce stream. One thread reads it; another writes queued messages. A null message ends the
// writing thread.
struct Exchange::Stream {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Reducer::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ReduceRequest, v1::ReduceResponse>> call;
  Queue<std::shared_ptr<v1::ReduceRequest>> outgoing;
  std::promise<bool> suits;  // whether the reducer has what the opening names
  std::thread reader, writer;
};

Exchange::Exchange(std::uint64_t number, std::string home, std::string folder,
                   v1::OpenRound opening, std::shared_ptr<Inbox> inbox)
    : number(number), home_(std::move(home)), folder_(std::move(folder)),
      opening_(std::move(opening)),
      operation_(names(opening_.capabilities(), kTrimmed) ? v1::OPERATION_TRIMMED_MEAN : v1::OPERATION_WEIGHTED_MEAN),
      inbox_(std::move(inbox)) {}

Exchange::~Exchange() {
  for (auto& [address, stream] : streams_) {
    stream->context.TryCancel();
    stream->outgoing.put(nullptr);
    stream->writer.join();
    stream->reader.join();
  }
}

Exchange::Stream& Exchange::to(const std::string& address) {
  auto& stream = streams_[address];
  if (stream) return *stream;
  stream = std::make_unique<Stream>();
  stream->channel = open_channel(address.empty() ? home_ : address, folder_);
  stream->stub = v1::Reducer::NewStub(stream->channel);
  stream->call = stream->stub->Reduce(&stream->context);
  auto opening = std::make_shared<v1::ReduceRequest>();
  *opening->mutable_open_round() = opening_;
  opening->mutable_open_round()->add_capabilities(kChecksums);
  stream->outgoing.put(opening);
  stream->writer = std::thread([it = stream.get(), waits = opening_.capabilities_size() > 0]() mutable {
    while (const auto message = it->outgoing.take()) {
      if (waits && !message->has_open_round() && !it->suits.get_future().get()) return;
      waits = waits && message->has_open_round();
      if (!it->call->Write(*message)) return;  // the reading thread reports the status
    }
  });
  stream->reader = std::thread([this, it = stream.get(), inbox = inbox_, number = number] {
    auto answer = std::make_shared<v1::ReduceResponse>();
    bool agreed = false, readable = true, opened = false;  // agreed: the reducer's averages have checksums
    for (; readable && it->call->Read(answer.get()); answer = std::make_shared<v1::ReduceResponse>()) {
      if (answer->has_round_opened() && !opened) {
        opened = true;
        agreed = names(answer->round_opened().capabilities(), kChecksums);
        it->suits.set_value(lacks(answer->round_opened()).empty());
      }
      readable = header_intact(*answer);
      if (readable) inbox->put({nullptr, answer, number, {}, agreed && !payload_intact(*answer)});
    }
    if (!opened) it->suits.set_value(false);
    if (!readable) it->context.TryCancel();
    auto ended = finish(*it->call, it->context);
    if (!readable) ended = {grpc::StatusCode::DATA_LOSS, "an average does not match its header_crc32c"};
    inbox->put({nullptr, nullptr, number, ended});
  });
  return *stream;
}

std::string Exchange::lacks(const v1::RoundOpened& opened) const {
  for (const auto& each : opening_.capabilities())
    if (!names(opened.capabilities(), each)) return each;
  return {};
}

void Exchange::send(const Round& round) {
  std::set<std::string> told;
  const auto put = [&](const std::string& address, const std::shared_ptr<v1::ReduceRequest>& message) {
    seal(*message);
    to(address).outgoing.put(message);
  };
  for (const auto& chunk : round.chunks) {
    if (round.outgoing.empty() && told.insert(chunk.address).second) {
      auto message = std::make_shared<v1::ReduceRequest>();
      auto* abstain = message->mutable_abstain();
      *abstain->mutable_key() = round.work.key();
      abstain->set_sequence(round.sequence);
      abstain->set_rank(round.work.rank());
      abstain->set_world_size(round.work.world_size());
      put(chunk.address, message);
    }
    for (const auto& each : round.outgoing) {
      auto message = std::make_shared<v1::ReduceRequest>();
      auto* block = message->mutable_block_gradient();
      *block->mutable_key() = round.work.key();
      block->set_sequence(round.sequence);
      block->set_operation(operation_);
      block->set_rank(round.work.rank());
      block->set_world_size(round.work.world_size());
      block->set_block(chunk.block);
      block->set_element_offset(chunk.offset);
      block->set_element_count(chunk.count);
      block->set_weight(each.weight);
      block->set_encoding(v1::ENCODING_FLOAT32);
      block->set_payload(to_bytes(each.gradients[chunk.block].data() + chunk.offset, chunk.count));
      if (each.node) *block->mutable_node() = *each.node;
      put(chunk.address, message);
    }
  }
}

}  // namespace andon
