#include "calls.h"

namespace sonicmoe::faults {

CallPtr unpack_call() {
  constexpr std::int64_t kExperts = 2, kRows = 256, kColumns = 512, kBlock = 64;
  auto call = std::make_unique<Call>("unpack: nf4");
  Random random(7);
  auto* packed = call->make<smoe_packed_weights>();
  packed->format = SMOE_NF4;
  packed->experts = kExperts;
  packed->rows = kRows;
  packed->columns = kColumns;
  packed->block = kBlock;
  packed->codes_bytes = kExperts * kRows * kColumns / 2;
  Bytes& codes = call->block(Role::kInput, packed->codes_bytes)->bytes;
  for (auto& byte : codes) byte = static_cast<std::uint8_t>(random.bits());
  packed->codes = codes.data();
  packed->scales_bytes = kExperts * kRows * kColumns / kBlock * 4;
  packed->scales = call->block(Role::kInput, packed->scales_bytes)->bytes.data();
  smoe_tensor* out = call->tensor(Role::kResult, SMOE_BF16, {kExperts, kRows, kColumns});
  auto* exec = call->make<smoe_exec>();
  exec->num_threads = 3;
  call->ready([=] { return smoe_unpack_weights(packed, out, exec); });
  return call;
}

}  // namespace sonicmoe::faults
