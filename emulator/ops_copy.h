// Decoders of asynchronous copies, by the file that has them.
#pragma once

#include "program.h"

namespace sonicmoe::emulator {

/// st.async (ops_copy.cc).
void decode_store_async(const Statement& statement, Builder& builder, Instruction* instruction);

/// cp.async.bulk and all that begins so (ops_bulk.cc).
void decode_bulk(const Statement& statement, Builder& builder, Instruction* instruction);

/// prefetch and prefetchu (ops_bulk.cc).
void decode_prefetch(const Statement& statement, Builder& builder, Instruction* instruction);

}  // namespace sonicmoe::emulator
