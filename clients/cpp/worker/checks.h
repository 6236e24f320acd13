// Validates messages before anything uses them: docs/protocol.md, section 3.
// gRPC and protobuf reject bytes that they can't parse. Each function returns what is wrong with a
// parsed message; an empty string means that it is valid.
#pragma once
#include <string>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.pb.h"

namespace andon {

// Why this client does not support the line that it joined.
std::string unsupported_line(const v1::JoinAccepted& welcome);

// What is wrong with a message from the coordinator, other than the answer to Join.
std::string message_error(const v1::TrainResponse& message);

// What is wrong with an answer from a reducer.
std::string answer_error(const v1::ReduceResponse& answer);

}  // namespace andon
