// What the instructions of tensor memory share.
#pragma once

#include "deferred.h"

namespace sonicmoe::emulator {

/// Throws Fault if the kernel has tcgen05 instructions of another cta_group, or if it is a 2 and
/// the cluster has no pair of CTAs.
void check_cta_group(Warp& warp, int group);
/// The CTA whose rank differs in the last bit.
Cta& other_of_pair(Warp& warp);
/// The lane of an instruction that one thread issues: `what`.
int single_lane(std::uint32_t lanes, const char* what);

/// tcgen05.mma (ops_umma.cc).
void decode_umma(const Statement& statement, Builder& builder, Instruction* instruction);

}  // namespace sonicmoe::emulator
