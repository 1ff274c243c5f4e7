// The shared memory that the metadata's kernels need.
#include "cuda/metadata/metadata.h"

#include <gtest/gtest.h>

namespace sonicmoe {
namespace {

// 8.6, 8.9 and 12.0 have the least shared memory: 99 KB for a block. The sort has 384 bytes of
// static arrays.
TEST(Metadata, TheSortOfMostExpertsFitsEveryDevice) {
  constexpr std::size_t kLeast = 99 * 1024;
  constexpr std::size_t kStatic = 1024;
  Problem p;
  p.experts = 1024;
  EXPECT_LE(cuda::sort_shared_bytes(p) + kStatic, kLeast);
  p.experts = 1;
  EXPECT_GT(cuda::sort_shared_bytes(p), 0u);
}

}  // namespace
}  // namespace sonicmoe
