// Groups of copies, if the lanes of a warp do not issue, commit and wait together.
#include "lane_copies.h"

#include <gtest/gtest.h>

namespace sonicmoe::emulator {
namespace {

CopyTask counting(int* count) {
  return std::make_shared<Copy>([count] { ++*count; });
}

TEST(LaneCopies, ALaneCommitsItsOwnCopiesOnly) {
  constexpr std::uint32_t kFirst = 1, kSecond = 2;
  LaneCopies copies;
  int finished = 0;
  copies.commit(kSecond);  // an empty group
  copies.issue(counting(&finished), kFirst | kSecond, 1);
  copies.commit(kFirst);
  copies.wait(kSecond, 0);
  EXPECT_EQ(finished, 0);
  copies.wait(kFirst, 0);
  EXPECT_EQ(finished, 1);
}

TEST(LaneCopies, TheLastOneIsKnownUntilItIsWaitedFor) {
  LaneCopies copies;
  int finished = 0;
  const CopyTask first = counting(&finished), second = counting(&finished);
  EXPECT_EQ(copies.last(), nullptr);
  copies.issue(first, kAllLanes, 2);
  copies.commit(kAllLanes);
  EXPECT_EQ(copies.last(), first);
  copies.issue(second, kAllLanes, 3);
  EXPECT_EQ(copies.last(), second);
  copies.commit(kAllLanes);
  copies.wait(kAllLanes, 0);
  EXPECT_EQ(copies.last(), nullptr);
}

TEST(LaneCopies, TheOldestThatALaneHasNotWaitedForIsKnown) {
  constexpr std::uint32_t kFirst = 1, kSecond = 2;
  LaneCopies copies;
  int finished = 0;
  EXPECT_EQ(copies.oldest(), std::nullopt);
  copies.issue(counting(&finished), kFirst | kSecond, 7);
  copies.issue(counting(&finished), kSecond, 8);
  copies.commit(kFirst | kSecond);
  EXPECT_EQ(copies.oldest(), 7u);
  copies.wait(kFirst, 0);
  EXPECT_EQ(copies.oldest(), 7u);
  copies.wait(kSecond, 0);
  EXPECT_EQ(copies.oldest(), std::nullopt);
}

TEST(LaneCopies, LanesWithDifferentNumbersOfGroupsWaitTogether) {
  constexpr std::uint32_t kFirst = 1, kSecond = 2;
  LaneCopies copies;
  int old = 0, last = 0;
  copies.issue(counting(&old), kFirst, 4);
  copies.commit(kFirst);
  copies.issue(counting(&last), kFirst | kSecond, 5);
  copies.commit(kFirst | kSecond);
  copies.wait(kFirst | kSecond, 1);
  EXPECT_EQ(old, 1);
  EXPECT_EQ(last, 0);
  copies.wait(kSecond, 0);
  EXPECT_EQ(last, 1);
}

}  // namespace
}  // namespace sonicmoe::emulator
