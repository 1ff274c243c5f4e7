// Row products: A, Y, dH, dX~ and the grouped GEMM.
#include <algorithm>
#include <optional>
#include <type_traits>

#include "core/packed_values.h"
#include "cuda/portable/choices.h"
#include "cuda/portable/epilogue_params.h"
#include "cuda/portable/kernels.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/params.h"
#include "cuda/portable/products.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {
namespace {

std::uint8_t* bytes_of(const Tensor& t) { return static_cast<std::uint8_t*>(t.data); }

Matrices matrices_of(const Tensor& t) {
  const std::int64_t line = major_of(t) == Major::kK ? t.stride[1] : t.stride[2];
  return {bytes_of(t), t.stride[0] * kElementBytes, line * kElementBytes};
}

/// Whether a product may have the narrow tile.
template <class Epilogue>
constexpr bool kMayBeNarrow = std::is_same_v<Epilogue, ActivateGrad>;

template <class Epilogue>
TileShape shape_of(const State& state, const RowProduct& product, const Epilogue&) {
  const std::int64_t columns = product.weights.first.shape[1];
  if (kMayBeNarrow<Epilogue> && state.narrow_depth && is_narrow(columns)) {
    return {*state.narrow_depth, Width::k128};
  }
  return {state.depth, Width::k256};
}

/// All fields except records_apart and column_tiles_apart, which depend on the number of CTAs.
RowTilesParams tiles_of(const RowProduct& product, const TileShape& shape) {
  const WeightOperand& w = product.weights;
  const auto tile_columns = static_cast<std::int32_t>(shape.width);
  const bool halves = w.parts == WeightParts::kSideBySide;
  RowTilesParams tiles{};
  tiles.records = product.groups.lists->records;
  tiles.record_count = product.groups.lists->record_count;
  tiles.rows = {bytes_of(product.rows.rows), product.rows.index,
                product.rows.rows.stride[0] * kElementBytes};
  tiles.weights[0] = matrices_of(w.first);
  tiles.weights[1] = w.parts == WeightParts::kOne ? tiles.weights[0] : matrices_of(w.second);
  tiles.columns = static_cast<std::int32_t>(w.first.shape[1]);
  tiles.column_step = halves ? tile_columns / 2 : tile_columns;
  tiles.column_tiles = (tiles.columns + tiles.column_step - 1) / tiles.column_step;
  tiles.second_half = halves ? 0 : tile_columns / 2;
  tiles.depth = static_cast<std::int32_t>(w.first.shape[2]);
  tiles.parts = w.parts == WeightParts::kOneAfterOther ? 2 : 1;
  const auto k_tiles = [&](std::int64_t k) {
    return static_cast<std::int32_t>((k + static_cast<int>(shape.depth) - 1) /
                                     static_cast<int>(shape.depth));
  };
  tiles.k_tiles = tiles.parts * k_tiles(tiles.depth);
  if (product.low_rank) {
    const LowRankTerm& term = *product.low_rank;
    tiles.weights[2] = matrices_of(term.outer[0]);
    tiles.weights[3] = halves ? matrices_of(term.outer[1]) : tiles.weights[2];
    tiles.inner = {bytes_of(term.inner), nullptr, term.inner.stride[0] * kElementBytes};
    tiles.rank = static_cast<std::int32_t>(term.inner.shape[1]);
    tiles.k_tiles += k_tiles(tiles.rank);
  }
  return tiles;
}

const void* kernel_of(const StoreOutput&, const Variant& variant, Major major) {
  return store_kernel(variant, major);
}
const void* kernel_of(const Activate&, const Variant& variant, Major major) {
  return activate_kernel(variant, major);
}
const void* kernel_of(const ActivateGrad&, const Variant& variant, Major major) {
  return activate_grad_kernel(variant, major);
}

/// Launches a kernel whose tiles are complete but for the distances between a CTA's tiles.
template <class Tiles, class Epilogue>
void launch_rows(const Device& device, const RowProduct& product, const Launch& kernel,
                 ProductParams<Tiles, Epilogue> params, cudaStream_t stream) {
  RowTilesParams& tiles = params.tiles;
  const std::int32_t ctas =
      ctas_of(device, kernel.shape, product.groups.most_tiles(tiles.column_tiles));
  tiles.records_apart = ctas / tiles.column_tiles;
  tiles.column_tiles_apart = ctas % tiles.column_tiles;
  run({kernel.kernel, kernel.shape, ctas, kernel.more_bytes}, &params, stream);
}

// Packed weights.

const void* packed_kernel_of(const StoreOutput&, Codes codes, Major major) {
  return packed_store_kernel(codes, major);
}
const void* packed_kernel_of(const Activate&, Codes codes, Major major) {
  return major == Major::kK ? packed_activate_kernel(codes) : nullptr;
}
const void* packed_kernel_of(const ActivateGrad&, Codes codes, Major major) {
  return major == Major::kMN ? packed_activate_grad_kernel(codes) : nullptr;
}

bool is_fp8(const PackedWeights& packed) { return packed.format == PackedFormat::kFP8Blocks; }

constexpr std::int64_t kPackedElements = 32;  ///< that a thread unpacks at a time

/// Whether every kPackedElements neighbours of `t`, along its contiguous dimension, are also the
/// elements that a thread unpacks together. The packed tensor would be unpacked to `memory`, of
/// which `t` is a view.
bool has_whole_runs(const Tensor& t, const void* memory) {
  const bool is_k_major = major_of(t) == Major::kK;
  const std::int64_t offset = bytes_of(t) - static_cast<const std::uint8_t*>(memory);
  return t.stride[is_k_major ? 2 : 1] == 1 && t.shape[is_k_major ? 2 : 1] % kPackedElements == 0 &&
         t.stride[is_k_major ? 1 : 2] % kPackedElements == 0 &&
         offset % (kPackedElements * kElementBytes) == 0;
}

/// Where `t`, a view of memory at `memory`, is in the packed matrix of an expert, if each of its
/// lines is a row or a part of a row.
std::optional<Fp8View> view_of(const Tensor& t, const PackedWeights& packed, const void* memory) {
  const bool is_k_major = major_of(t) == Major::kK;
  const std::int64_t first =
      (bytes_of(t) - static_cast<const std::uint8_t*>(memory)) / kElementBytes;
  const std::int64_t line = t.stride[is_k_major ? 1 : 2];
  const std::int64_t column = first % packed.columns;
  if (line % packed.columns != 0 || column + t.shape[is_k_major ? 2 : 1] > packed.columns) {
    return {};
  }
  return Fp8View{static_cast<std::int32_t>(first / packed.columns),
                 static_cast<std::int32_t>(line / packed.columns),
                 static_cast<std::int32_t>(column)};
}

bool can_unpack(const Device& device, const PackedProduct& work) {
  constexpr std::int64_t kMostUnits = std::int64_t{1} << 32;
  const PackedWeights& packed = *work.weights;
  const WeightOperand& w = work.product.weights;
  const void* memory = unpacked_memory(w);
  const auto fits = [&](const Tensor& t) {
    return t.data == nullptr ||
           (has_whole_runs(t, memory) && (!is_fp8(packed) || view_of(t, packed, memory)));
  };
  return state_of(device).unpacks && work.product.dtype == DType::kBF16 &&
         packed::bytes_of(packed).codes / 16 < kMostUnits &&
         reinterpret_cast<std::uintptr_t>(packed.codes.data) % 16 == 0 && fits(w.first) &&
         fits(w.second);
}

/// The codes of matrices that would be unpacked to `t`, a view of memory at `memory`.
Matrices packed_matrices(const Tensor& t, const PackedWeights& packed, const void* memory) {
  const std::int64_t bytes = is_fp8(packed) ? kElementBytes : kElementBytes * 2;  // of a code's
  const Matrices m = matrices_of(t);
  const std::int64_t offset = m.data - static_cast<const std::uint8_t*>(memory);
  return {static_cast<const std::uint8_t*>(packed.codes.data) + offset / bytes,
          m.expert_bytes / bytes, m.line_bytes / bytes};
}

Fp8Codes fp8_codes_of(const PackedProduct& work) {
  const PackedWeights& packed = *work.weights;
  const WeightOperand& w = work.product.weights;
  const void* memory = unpacked_memory(w);
  Fp8Codes codes{};
  codes.codes = static_cast<const std::uint8_t*>(packed.codes.data);
  codes.scales = static_cast<const float*>(packed.scales.data);
  codes.across = static_cast<std::uint32_t>(packed::divide_up(packed.columns, packed::kFP8Block));
  codes.expert_scales =
      codes.across * static_cast<std::uint32_t>(packed::divide_up(packed.rows, packed::kFP8Block));
  codes.views[0] = *view_of(w.first, packed, memory);
  codes.views[1] =
      w.parts == WeightParts::kOne ? codes.views[0] : *view_of(w.second, packed, memory);
  return codes;
}

PackedCodes codes_of(const PackedWeights& packed) {
  const bool is_nf4 = packed.format == PackedFormat::kNF4;
  PackedCodes codes{};
  codes.codes = static_cast<const std::uint8_t*>(packed.codes.data);
  codes.scales = packed.scales.data;
  codes.nested_map = static_cast<const float*>(packed.nested_map.data);
  codes.nested_scales = static_cast<const float*>(packed.nested_scales.data);
  codes.nested_offset = static_cast<const float*>(packed.nested_offset.data);
  for (std::uint32_t i = 0; i < 16; ++i) {
    codes.values[i] = is_nf4 ? packed::nf4_of(i) : packed::e2m1_of(i);
  }
  // The even element of a byte is its high digit in NF4.
  codes.order[0] = is_nf4 ? 0x4051 : 0x5140;
  codes.order[1] = is_nf4 ? 0x6273 : 0x7362;
  codes.digits = 0x32103210;
  for (std::int64_t block = packed.block / kPackedElements; block > 1; block /= 2) {
    ++codes.block_shift;
  }
  codes.scale = !is_nf4                             ? ScaleKind::kExponent
                : packed.nested_map.data == nullptr ? ScaleKind::kFloat
                                                    : ScaleKind::kNested;
  return codes;
}

}  // namespace

void multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream) {
  std::visit(
      [&](const auto& epilogue) {
        const TileShape shape = shape_of(state_of(device), product, epilogue);
        const void* kernel =
            kernel_of(epilogue, {product.dtype, shape}, major_of(product.weights.first));
        launch_rows(device, product, {kernel, shape, 0},
                    ProductParams<RowTilesParams, decltype(epilogue_params(epilogue))>{
                        tiles_of(product, shape), epilogue_params(epilogue)},
                    stream);
      },
      product.epilogue);
}

bool multiply_packed_rows(const Device& device, const PackedProduct& work, cudaStream_t stream) {
  if (!can_unpack(device, work)) return false;
  const RowProduct& product = work.product;
  const WeightOperand& w = product.weights;
  const void* memory = unpacked_memory(w);
  RowTilesParams tiles = tiles_of(product, kPackedShape);
  tiles.weights[0] = packed_matrices(w.first, *work.weights, memory);
  tiles.weights[1] = w.parts == WeightParts::kOne
                         ? tiles.weights[0]
                         : packed_matrices(w.second, *work.weights, memory);
  return std::visit(
      [&](const auto& epilogue) {
        const bool fp8 = is_fp8(*work.weights);
        const void* kernel =
            packed_kernel_of(epilogue, fp8 ? Codes::kFp8 : Codes::kDigits, major_of(w.first));
        if (kernel == nullptr) return false;
        const auto launch = [&](const auto& packed_tiles, int more_bytes) {
          const auto params = epilogue_params(epilogue);
          launch_rows(
              device, product, {kernel, kPackedShape, 0, more_bytes},
              ProductParams<std::decay_t<decltype(packed_tiles)>, std::decay_t<decltype(params)>>{
                  packed_tiles, params},
              stream);
        };
        if (fp8) {
          launch(Fp8TilesParams{tiles, fp8_codes_of(work)}, kFp8More);
        } else {
          launch(PackedTilesParams{tiles, codes_of(*work.weights)}, kDigitsMore);
        }
        return true;
      },
      product.epilogue);
}

}  // namespace sonicmoe::cuda::portable
