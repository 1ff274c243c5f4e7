// The cases of unpack_weights().
#include <initializer_list>

#include "verify/cases.h"

namespace sonicmoe::verify {
namespace {

struct Form {
  const char* name;
  PackedForm packed;
  std::int64_t experts, rows, columns;
};
constexpr PackedFormat kNF4 = PackedFormat::kNF4, kFP8 = PackedFormat::kFP8Blocks;
constexpr Form kForms[] = {
    {"nf4", {kNF4, 64, false}, 3, 40, 192},
    {"nf4_small_blocks", {kNF4, 32, false}, 2, 33, 96},
    {"nf4_large_blocks", {kNF4, 4096, false}, 2, 24, 4096},
    // Five nested scales; one that is not whole.
    {"nf4_nested", {kNF4, 64, true}, 3, 104, 256},
    {"nf4_nested_small", {kNF4, 32, true}, 2, 7, 32},
    {"mxfp4", {PackedFormat::kMXFP4, 0, false}, 5, 13, 160},
    {"mxfp4_wide", {PackedFormat::kMXFP4, 0, false}, 3, 20, 2880},
    // Blocks that the last rows and columns do not fill; whole ones.
    {"fp8_blocks", {kFP8, 0, false}, 2, 129, 272},
    {"fp8_blocks_whole", {kFP8, 0, false}, 3, 256, 128},
    {"fp8_blocks_odd", {kFP8, 0, false}, 2, 5, 131},
};

}  // namespace

void add_packed_cases(Extent extent, std::vector<Case>& cases) {
  const auto add = [&](const Form& form, DType dtype) {
    Case c;
    c.name = std::string("unpack/") + form.name + "/" + dtype_name(dtype);
    c.subject = Subject::kUnpack;
    c.problem.dtype = dtype;
    c.problem.experts = form.experts;
    c.problem.width = form.rows;
    c.problem.hidden = form.columns;
    c.packed = form.packed;
    c.data = Data::kRoundings;
    c.cpu_only = form.packed.format == kFP8 && form.columns % 16 != 0;
    cases.push_back(c);
  };
  for (const Form& form : kForms) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) add(form, dtype);
  }
  if (extent == Extent::kFull) {  // several chunks for each block of CUDA's grid
    add({"nf4_large", {kNF4, 64, true}, 16, 1536, 512}, DType::kBF16);
  }
}

}  // namespace sonicmoe::verify
