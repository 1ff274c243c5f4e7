// Negative controls of batch invariance. Each broken implementation is accurate and repeatable;
// only the comparison of a part of the tokens with the whole batch can find it.
#include <algorithm>
#include <map>

#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

constexpr const char* kIds = "batch/ids_gated/bf16/random";
constexpr const char* kFp8 = "fp8/batch/ids_gated/random";
constexpr const char* kPairs = "batch/pairs_gated/bf16/random";
constexpr const char* kGrouped = "batch/grouped_gated/bf16/random";

constexpr std::int64_t kTileRows = 128;

bool is_large(const Problem& p) { return row_capacity(p) > 2 * kTileRows * p.experts; }

// Changes the last bit of an element, as another order of a sum would.
void change_element(const Tensor& t, std::int64_t index) {
  const std::int64_t offset = oracle::element_offset(t, index);
  static_cast<std::uint8_t*>(t.data)[offset * dtype_bytes(t.dtype)] ^= 1;
}

// f(row, position) for the row of dx of each token, and the position of the token's first slot
// among the rows of its expert.
template <class F>
void for_each_position(const Tensor& ids, F f) {
  std::map<std::int64_t, std::int64_t> rows;
  const std::int64_t k = ids.shape[1];
  for (std::int64_t i = 0; i < oracle::element_count(ids); ++i) {
    const std::int64_t position = rows[oracle::load_integer(ids, i)]++;
    if (i % k == 0) f(i / k, position);
  }
}

// Reverses each row.
void reverse_slots(const Tensor& t) {
  std::vector<double> values = oracle::read(t);
  for (std::int64_t row = 0; row < row_count(t); ++row) {
    const auto begin = values.begin() + row * row_length(t);
    std::reverse(begin, begin + row_length(t));
  }
  oracle::write(t, values);
}
void reverse_ids(const Tensor& t) {
  auto* ids = static_cast<std::int64_t*>(t.data);
  for (std::int64_t row = 0; row < row_count(t); ++row) {
    std::reverse(ids + row * row_length(t), ids + (row + 1) * row_length(t));
  }
}

// Sums the rows of a token in descending instead of ascending order of slots.
Break with_another_order_of_large_sums() {
  return [](const Implementation& sound) {
    Implementation broken = sound;
    const auto reverse = [](DeviceCopies& copies, Routing& routing) {
      routing.ids = copies.changed(routing.ids, reverse_ids);
      routing.weights = copies.changed(routing.weights, reverse_slots);
    };
    broken.moe_forward = [=](const Problem& p, ForwardArgs args) {
      DeviceCopies copies(sound.memory);
      if (is_large(p)) reverse(copies, args.routing);
      sound.moe_forward(p, args);
    };
    broken.moe_backward = [=](const Problem& p, BackwardArgs args) {
      DeviceCopies copies(sound.memory);
      if (is_large(p)) reverse(copies, args.routing);
      sound.moe_backward(p, args);
      if (is_large(p)) edit(sound.memory, args.dweights, reverse_slots);
    };
    return broken;
  };
}

}  // namespace

std::vector<Control> controls_of_batches() {
  const auto found_in = [](std::initializer_list<const char*> names) {
    std::vector<Expectation> expectations;
    for (const char* name : names) expectations.push_back({name, Fault::kBatch});
    return expectations;
  };
  return {
      {"out has other bits if experts have more rows than two tiles",
       found_in({kIds, kFp8, kPairs, kGrouped}),
       after_forward([](const Memory& memory, const Problem& p, const ForwardArgs& args) {
         if (is_large(p))
           edit(memory, args.out, [](const Tensor& t) { change_element(t, row_length(t)); });
       })},
      {"the row weights' gradients have other bits if experts have more rows than two tiles",
       found_in({kIds, kFp8, kGrouped}),
       after_backward([](const Memory& memory, const Problem& p, const BackwardArgs& args) {
         if (!is_large(p)) return;
         edit(memory, args.dweights, [](const Tensor& t) { change_element(t, 1); });
       })},
      {"dx has other bits in every second tile of an expert", found_in({kIds, kFp8}),
       after_backward([](const Memory& memory, const Problem&, const BackwardArgs& args) {
         edit(memory, args.routing.ids, [&](const Tensor& ids) {
           edit(memory, args.dx, [&](const Tensor& dx) {
             for_each_position(ids, [&](std::int64_t row, std::int64_t position) {
               if (position / kTileRows % 2 == 1) change_element(dx, row * row_length(dx));
             });
           });
         });
       })},
      {"a token's rows are summed in another order if experts have more rows than two tiles",
       found_in({"batch/ids_plain/f32/random"}), with_another_order_of_large_sums()},
  };
}

}  // namespace sonicmoe::verify
