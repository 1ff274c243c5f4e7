#include "verify/caller.h"

#include <algorithm>

namespace sonicmoe::verify {
namespace {

// The specification leaves open whether db1 sums dH before or after dH is rounded.
bool rounding_is_open(const Expected& e) { return e.what == "db_gate" || e.what == "db_up"; }

}  // namespace

void Caller::call(const CallSetup& setup, const std::vector<Expected>& outputs,
                  const std::function<void()>& run) {
  for (Block& block : blocks_.all()) block.allow_none();
  for (const Expected& e : outputs) e.tensor.allow();
  for (Block* block : setup.buffers) block->allow_all();
  for (Block& block : blocks_.all()) block.poison(setup.filling);
  if (setup.prepare) setup.prepare();
  for (Block& block : blocks_.all()) block.upload();
  run();
  for (Block& block : blocks_.all()) {
    const std::optional<std::int64_t> at = block.download();
    if (!at) continue;
    const bool within = *at >= 0 && *at < block.bytes();
    const bool output = std::any_of(outputs.begin(), outputs.end(),
                                    [&](const Expected& e) { return e.tensor.block == &block; });
    throw Rejected{{within && !output ? Fault::kInputChanged : Fault::kOutside,
                    setup.what + " changed byte " + std::to_string(*at) + " of " + block.what() +
                        " (" + std::to_string(block.bytes()) + " bytes), which " +
                        (output ? "is no element of the output" : "it must not write")}};
  }
}

void Caller::judge(const std::vector<Expected>& outputs, std::uint8_t filling) {
  for (const Expected& e : outputs) {
    Verdict verdict;
    const bool index = e.tensor.view.dtype == DType::kI32 || e.tensor.view.dtype == DType::kI64;
    if (case_.data == Data::kRandom && !index) {
      Measure measure;
      verdict = judge_error(e, filling, measure);
      result_.measures.push_back(measure);
    } else if (case_.data == Data::kIntegers || !rounding_is_open(e)) {
      verdict = judge_equal(e, filling);
    }
    if (verdict.fault != Fault::kNone) throw Rejected{verdict};
  }
}

Caller::Bits Caller::bits(const std::vector<Expected>& outputs) {
  Bits all;
  for (const Expected& e : outputs) {
    Block& block = *e.tensor.block;
    all.emplace_back(block.host(), block.host() + block.bytes());
  }
  return all;
}

void Caller::require_same(const Bits& before, const std::vector<Expected>& outputs,
                          const std::string& when) {
  const Bits now = bits(outputs);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    require(now[i] == before[i], Fault::kNotRepeatable,
            outputs[i].what + " has other bits after " + when);
  }
}

}  // namespace sonicmoe::verify
