// CRC-32C of what travels in bulk: docs/protocol-data.md, section 16.
#pragma once
#include "andon/v1/reducer.pb.h"

namespace andon {

inline constexpr char kChecksums[] = "crc32c.v1";

// Puts the checksums beside a contribution: that of its header, and with a payload that of both.
void seal(v1::ReduceRequest& request);

// Whether an answer is what was sent, as far as a checksum of its header says so.
bool header_intact(const v1::ReduceResponse& answer);

// Whether an average has a checksum and matches it. One without numbers needs none.
bool payload_intact(const v1::ReduceResponse& answer);

}  // namespace andon
