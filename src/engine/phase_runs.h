// Runs one phase on an executor that nobody else uses, and times it: what `lily ablate` compares, policy
// against policy, without the queues of an engine around it. Steps are those that the scheduler would make
// for one sequence.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "engine/executor.h"
#include "model/dims.h"

namespace lily::engine {

// Fills the first n_blocks KV blocks with values of the size that normalised keys have, so that a context
// need not be read before its decoding is timed. No step may be in flight.
void fill_cache(backend::Device& device, const model::Dims& dims, int n_blocks);

// Reads a prompt from nothing to its first token, in the executor's chunks. Returns seconds.
double time_prompt(Executor& executor, std::span<const int32_t> prompt);

// Writes n_tokens greedily behind `context` tokens whose keys and values are taken as they lie in the blocks
// 0, 1, ... Returns seconds.
double time_tokens(Executor& executor, int32_t context, int n_tokens);

}  // namespace lily::engine
