// What a message must have before anything in it is believed: docs/protocol.md, section 3.
// The libraries refuse what is no message at all. Each function says what is wrong; empty: nothing.
#pragma once
#include <string>

#include "andon/v1/coordinator.pb.h"
#include "andon/v1/reducer.pb.h"

namespace andon {

// Why this client can't work on the line that answered its Join.
std::string unfit(const v1::JoinAccepted& welcome);

// Of a message of the coordinator, other than the answer to Join.
std::string wrong_word(const v1::TrainResponse& message);

// Of a reducer's answer: it names no round, or says what is not known here.
std::string wrong_answer(const v1::ReduceResponse& answer);

}  // namespace andon
