// unpack_weights() with codes and scales of any bytes, against the oracle.
#include <cmath>

#include "fuzz/world.h"
#include "verify/convert.h"
#include "verify/oracle_packed.h"

namespace sonicmoe::fuzz {
namespace {

struct Operand {
  World& w;
  smoe_packed_weights c{};
  std::vector<Lent*> buffers;

  explicit Operand(World& world) : w(world) {
    Random& r = w.random;
    c.size = sizeof(c);
    c.format = static_cast<std::int32_t>(r.in(0, kPackedFormatCount - 1));
    c.experts = r.in(1, 3);
    c.rows = r.in(1, 9);
    const bool is_fp8 = c.format == SMOE_FP8_BLOCKS, is_nf4 = c.format == SMOE_NF4;
    if (is_nf4) c.block = r.pick({32, 64});
    c.columns = is_fp8 ? r.in(1, 150) : r.in(1, 3) * (is_nf4 ? c.block : 32);
    const std::int64_t elements = c.experts * c.rows * c.columns;
    add("codes", is_fp8 ? elements : elements / 2);
    const bool nested = is_nf4 && r.percent(50);
    const std::int64_t blocks = is_nf4   ? elements / c.block
                                : is_fp8 ? c.experts * ((c.columns + 127) / 128)
                                         : elements / 32;
    add("scales", is_fp8 || (is_nf4 && !nested) ? 4 * blocks : blocks);
    if (!nested) return;
    add("nested_map", 1024);
    add("nested_scales", 4 * ((blocks + 255) / 256));
    add("nested_offset", 4);
  }

  /// Any bytes for the buffers, whose memory the world has placed.
  void bind() {
    const void** pointers[] = {&c.codes, &c.scales, &c.nested_map, &c.nested_scales,
                               &c.nested_offset};
    std::int64_t* sizes[] = {&c.codes_bytes, &c.scales_bytes, &c.nested_map_bytes,
                             &c.nested_scales_bytes, &c.nested_offset_bytes};
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const Lent& lent = *buffers[i];
      *pointers[i] = lent.data;
      *sizes[i] = lent.bytes;
      if (lent.data == nullptr) continue;
      const std::int64_t bytes = std::min(lent.bytes, lent.needed);
      for (std::int64_t b = 0; b < bytes; ++b) lent.data[b] = std::byte(w.random.bits() & 0xff);
    }
  }

  PackedWeights cpp() const {
    const auto lend = [](const void* data, std::int64_t bytes) {
      return Buffer{const_cast<void*>(data), bytes};
    };
    return {static_cast<PackedFormat>(c.format),
            c.experts,
            c.rows,
            c.columns,
            c.block,
            lend(c.codes, c.codes_bytes),
            lend(c.scales, c.scales_bytes),
            lend(c.nested_map, c.nested_map_bytes),
            lend(c.nested_scales, c.nested_scales_bytes),
            lend(c.nested_offset, c.nested_offset_bytes)};
  }

 private:
  void add(const char* name, std::int64_t bytes) {
    buffers.push_back(&w.buffer(name, bytes));
    buffers.back()->is_read = true;
  }
};

}  // namespace

void fuzz_packed(World& w) {
  Operand packed(w);
  const smoe_packed_weights& c = packed.c;
  const auto dtype = w.random.pick<std::int32_t>({SMOE_F32, SMOE_BF16, SMOE_F16});
  Arg& out = w.tensor("out", Access::kWritten, dtype, {c.experts, c.rows, c.columns});
  const std::int64_t strides[] = {c.rows * c.columns, c.columns, 1};
  std::copy(std::begin(strides), std::end(strides), out.c.tensor.stride);
  w.begin_exec();
  w.size_field("packed.size", &packed.c.size);
  w.field("packed.format", &packed.c.format);
  w.field("packed.experts", &packed.c.experts);
  w.field("packed.rows", &packed.c.rows);
  w.field("packed.columns", &packed.c.columns);
  w.field("packed.block", &packed.c.block);
  w.spoil(60);
  w.place();
  packed.bind();
  const bool served =
      w.call([&] { return smoe_unpack_weights(&c, out.pointer(), w.exec_pointer()); });
  if (!served || w.spoilt()) return;
  const std::vector<double> got = oracle::read(out.view());
  const std::vector<double> want = oracle::unpack_weights(packed.cpp(), out.view().dtype);
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) continue;
    throw Fault("out[" + std::to_string(i) + "] is " + std::to_string(got[i]) + ", expected " +
                std::to_string(want[i]));
  }
}

}  // namespace sonicmoe::fuzz
