#include "worker/exchange.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "worker/digests.h"

namespace andon {

void Round::cut(const v1::Layout& layout, std::uint64_t size,
                const google::protobuf::RepeatedPtrField<v1::ReducerShare>& shares) {
  std::uint64_t flat = 0;
  for (int block = 0; block < layout.blocks_size(); ++block) {
    const std::uint64_t whole = elements(layout.blocks(block));
    for (std::uint64_t offset = 0; offset < whole; offset += size) {
      const std::uint64_t count = std::min(size, whole - offset), begin = flat + offset;
      const auto share = std::find_if(shares.begin(), shares.end(), [&](const auto& each) {
        return each.start_element() <= begin && begin + count <= each.stop_element();
      });
      if (share == shares.end())
        throw std::runtime_error("the map of reducers does not hold block " + std::to_string(block));
      chunks.push_back({block, offset, count, share->address()});
      reducers.insert(share->address());
    }
    flat += whole;
    averages.emplace_back(whole);
  }
  for (const auto& chunk : chunks) waiting[{chunk.block, chunk.offset}] = &chunk;
}

void Round::take(const v1::AveragedBlock& average) {
  if (average.group() != 0 || average.sequence() != 0)
    throw std::runtime_error("an average of another exchange came");
  if (average.world_size() != work.world_size())
    throw std::runtime_error("an average is over another number of ranks");
  if (total >= 0 && average.total_weight() != total)
    throw std::runtime_error("averages are over different weights");
  total = average.total_weight();
  if (total == 0 && average.element_count() == 0) {
    ++silent;
    return;
  }
  const auto found = waiting.find({average.block(), average.element_offset()});
  if (found == waiting.end() || average.element_count() != found->second->count ||
      average.payload().size() != 4 * found->second->count ||
      average.encoding() != v1::ENCODING_FLOAT32)
    throw std::runtime_error("an average came that is not awaited");
  const Chunk& chunk = *found->second;
  from_bytes(averages[chunk.block].data() + chunk.offset, average.payload().data(), chunk.count);
  waiting.erase(found);
}

double Round::norm() const {
  double sum = 0;
  for (const auto& block : averages)
    for (const double number : block) sum += number * number;
  return std::sqrt(sum);
}

// One Reduce stream: a thread reads it, and one writes what is queued. A null message ends that.
struct Exchange::Stream {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Reducer::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ReduceRequest, v1::ReduceResponse>> call;
  Queue<std::shared_ptr<v1::ReduceRequest>> outgoing;
  std::thread reader, writer;
};

Exchange::Exchange(std::uint64_t number, std::string home, std::string folder,
                   v1::OpenRound opening, std::shared_ptr<Inbox> inbox)
    : number(number), home_(std::move(home)), folder_(std::move(folder)),
      opening_(std::move(opening)), inbox_(std::move(inbox)) {}

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
  stream->outgoing.put(opening);
  stream->writer = std::thread([it = stream.get()] {
    while (const auto message = it->outgoing.take())
      if (!it->call->Write(*message)) return;  // the reader says why
  });
  stream->reader = std::thread([it = stream.get(), inbox = inbox_, number = number] {
    auto answer = std::make_shared<v1::ReduceResponse>();
    for (; it->call->Read(answer.get()); answer = std::make_shared<v1::ReduceResponse>())
      inbox->put({nullptr, answer, number, {}});
    inbox->put({nullptr, nullptr, number, it->call->Finish()});
  });
  return *stream;
}

void Exchange::send(const Round& round, const std::vector<std::vector<float>>& gradients) {
  std::set<std::string> told;
  for (const auto& chunk : round.chunks) {
    auto message = std::make_shared<v1::ReduceRequest>();
    if (round.samples == 0) {
      if (!told.insert(chunk.address).second) continue;
      auto* abstain = message->mutable_abstain();
      *abstain->mutable_key() = round.work.key();
      abstain->set_rank(round.work.rank());
      abstain->set_world_size(round.work.world_size());
    } else {
      auto* block = message->mutable_block_gradient();
      *block->mutable_key() = round.work.key();
      block->set_operation(v1::OPERATION_WEIGHTED_MEAN);
      block->set_rank(round.work.rank());
      block->set_world_size(round.work.world_size());
      block->set_block(chunk.block);
      block->set_element_offset(chunk.offset);
      block->set_element_count(chunk.count);
      block->set_weight(static_cast<double>(round.samples));
      block->set_encoding(v1::ENCODING_FLOAT32);
      block->set_payload(to_bytes(gradients[chunk.block].data() + chunk.offset, chunk.count));
    }
    to(chunk.address).outgoing.put(message);
  }
}

}  // namespace andon
