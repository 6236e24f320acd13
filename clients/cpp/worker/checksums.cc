#include "worker/checksums.h"

#include <boost/crc.hpp>
#include <cstring>

namespace andon {
namespace {

// A header is the number of the message's case and its fields, little-endian and at full width.
class Checksum {
 public:
  Checksum& u32(std::uint64_t number) { return put(number, 4); }
  Checksum& u64(std::uint64_t number) { return put(number, 8); }
  Checksum& key(const v1::Key& key) { return u64(key.term()).u64(key.round()); }

  Checksum& f64(double number) {
    std::uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return u64(bits);
  }

  // Of the header so far, then of `payload`.
  std::uint32_t with(const std::string& payload) const {
    auto crc = crc_;
    crc.process_bytes(payload.data(), payload.size());
    return crc.checksum();
  }
  std::uint32_t value() const { return crc_.checksum(); }

 private:
  Checksum& put(std::uint64_t number, int bytes) {
    for (int i = 0; i < bytes; ++i) crc_.process_byte(static_cast<unsigned char>(number >> 8 * i));
    return *this;
  }

  boost::crc_optimal<32, 0x1EDC6F41, 0xFFFFFFFF, 0xFFFFFFFF, true, true> crc_;
};

Checksum header_of(const v1::BlockGradient& it) {
  auto header = Checksum().u32(2).key(it.key()).u32(it.group()).u32(it.sequence()).u32(it.operation())
      .u32(it.rank()).u32(it.world_size()).u32(it.block()).u64(it.element_offset()).u64(it.element_count())
      .f64(it.weight()).u32(it.encoding()).u32(it.answer_encoding());
  const auto& node = it.node();
  if (it.has_node()) header.u32(node.first()).u32(node.grains()).u32(node.batch_grains()).u32(node.grain());
  return header;
}

Checksum header_of(const v1::Abstain& it) {
  return Checksum().u32(3).key(it.key()).u32(it.group()).u32(it.sequence()).u32(it.rank()).u32(it.world_size());
}

Checksum header_of(const v1::AveragedBlock& it) {
  return Checksum().u32(2).key(it.key()).u32(it.group()).u32(it.sequence()).u32(it.operation())
      .u32(it.contributors()).u32(it.world_size()).u32(it.block()).u64(it.element_offset())
      .u64(it.element_count()).f64(it.total_weight()).u32(it.encoding());
}

}  // namespace

void seal(v1::ReduceRequest& request) {
  if (request.has_abstain()) request.set_header_crc32c(header_of(request.abstain()).value());
  if (!request.has_block_gradient()) return;
  const auto header = header_of(request.block_gradient());
  request.set_header_crc32c(header.value());
  request.set_crc32c(header.with(request.block_gradient().payload()));
}

bool header_intact(const v1::ReduceResponse& answer) {
  if (!answer.has_averaged_block() || !answer.has_header_crc32c()) return true;
  return answer.header_crc32c() == header_of(answer.averaged_block()).value();
}

bool payload_intact(const v1::ReduceResponse& answer) {
  if (!answer.has_averaged_block() || answer.averaged_block().payload().empty()) return true;
  const auto& average = answer.averaged_block();
  return answer.has_crc32c() && answer.crc32c() == header_of(average).with(average.payload());
}

}  // namespace andon
