// What the instructions of tensor memory share.
#pragma once

#include "deferred.h"
#include "wgmma.h"

namespace sonicmoe::emulator {

/// Throws Fault if the kernel has tcgen05 instructions of another cta_group, or if it is a 2 and
/// the cluster has no pair of CTAs.
void check_cta_group(Warp& warp, int group);
/// The CTA whose rank differs in the last bit.
Cta& other_of_pair(Warp& warp);
/// The lane of an instruction that one thread issues: `what`.
int single_lane(std::uint32_t lanes, const char* what);

/// For instructions of a thread's pipeline, `what`: throws Fault if another lane has issued one, or
/// if it is one of a pair and the CTA is the odd one or alone.
void check_issuer(Warp& warp, int lane, int group, const char* what);
/// For products and copies: a fence of the issuing warp orders writes to its own CTA only.
inline int reader_in(Warp& warp, const Cta& cta) {
  return &cta == &warp.cta() ? warp.index() : kNoReader;
}

/// tcgen05.cp (ops_scale_copy.cc).
void decode_scale_copy(const Statement& statement, Builder& builder, Instruction* instruction);
/// tcgen05.mma (ops_umma.cc).
void decode_umma(const Statement& statement, Builder& builder, Instruction* instruction);

}  // namespace sonicmoe::emulator
