#include "target.h"

#include <algorithm>
#include <charconv>

#include "program.h"

namespace sonicmoe::emulator {
namespace {

struct Requirement {
  std::string_view opcode;  ///< the first part; empty: any
  std::string_view part;    ///< another part; empty: any
  int capability;
};

/// From "Target ISA Notes" of the PTX specification: instructions that need more than sm_80, which
/// is the least that the library supports. Instructions that the emulator does not know are left
/// out.
constexpr Requirement kRequirements[] = {
    {"min", "xorsign", 86},
    {"max", "xorsign", 86},
    {"mma", "e4m3", 89},
    {"mma", "e5m2", 89},
    {"cvt", "e4m3x2", 89},
    {"cvt", "e5m2x2", 89},
    {"", "shared::cluster", 90},
    {"", "cluster", 90},  // barrier.cluster, and the scope of fences and mbarriers
    {"add", "bf16x2", 90},
    {"sub", "bf16x2", 90},
    {"mul", "bf16x2", 90},
    {"atom", "bf16x2", 90},
    {"red", "bf16x2", 90},
    {"atom", "v2", 90},
    {"atom", "v4", 90},
    {"red", "v2", 90},
    {"red", "v4", 90},
    {"red", "async", 90},
    {"st", "async", 90},
    {"cp", "bulk", 90},
    {"elect", "", 90},
    {"fence", "acquire", 90},
    {"fence", "release", 90},
    {"fence", "async", 90},
    {"fence", "tensormap", 90},
    {"fence", "mbarrier_init", 90},
    {"griddepcontrol", "", 90},
    {"mapa", "", 90},
    {"getctarank", "", 90},
    {"mbarrier", "try_wait", 90},
    {"mbarrier", "expect_tx", 90},
    {"mbarrier", "complete_tx", 90},
    {"prefetch", "tensormap", 90},
    {"stmatrix", "", 90},
    {"", "tile::gather4", 100},
    {"add", "f32x2", 100},
    {"mul", "f32x2", 100},
    {"fma", "f32x2", 100},
};

/// Special registers of clusters begin so. They need sm_90.
constexpr std::string_view kClusterRegisters[] = {"%cluster", "%ncluster", "%is_explicit_cluster"};

bool reads_cluster(const Operand& operand) {
  if (std::any_of(operand.elements.begin(), operand.elements.end(), &reads_cluster)) return true;
  return operand.kind == Operand::Kind::kSpecial &&
         std::any_of(std::begin(kClusterRegisters), std::end(kClusterRegisters),
                     [&](std::string_view begin) { return operand.name.starts_with(begin); });
}

bool is_met(const Statement& s, const Target& target) {
  const bool is_wgmma = s.opcode() == "wgmma";
  if (is_wgmma) return target == Target{90, true};
  const bool has_features = target.is_specific || target.is_family;
  // 10.0 and 10.3; 11.0 has them too, but no engine is made for it.
  if (s.opcode() == "tcgen05" || s.has("cta_group::1") || s.has("cta_group::2")) {
    const bool needs_specific = s.has("scale_vec::1X");  // .block32 is the same for families
    return (needs_specific ? target.is_specific : has_features) && target.capability / 10 == 10;
  }
  if (s.opcode() == "setmaxnreg") return has_features;
  if (target.capability < 90 && std::any_of(s.operands.begin(), s.operands.end(), &reads_cluster)) {
    return false;
  }
  return std::none_of(std::begin(kRequirements), std::end(kRequirements), [&](const auto& r) {
    return target.capability < r.capability && (r.opcode.empty() || s.opcode() == r.opcode) &&
           (r.part.empty() || s.has(r.part));
  });
}

}  // namespace

std::string Target::name() const {
  return "sm_" + std::to_string(capability) + (is_specific ? "a" : is_family ? "f" : "");
}

bool Target::runs_on(int device_capability) const {
  if (is_specific) return device_capability == capability;
  if (device_capability < capability) return false;
  if (is_family) return device_capability / 10 == capability / 10;
  return device_capability / 10 == capability / 10 || capability == 80;
}

void Target::check(const Statement& statement) const {
  if (!is_met(statement, *this)) throw Fault(name() + " does not have this instruction");
}

Target target_of(std::string_view text) {
  static constexpr std::string_view kDirective = "\n.target sm_";
  const std::size_t at = text.find(kDirective);
  if (at == text.npos) throw Fault("a text of PTX has no .target");
  text.remove_prefix(at + kDirective.size());
  Target target;
  const char* const end = text.data() + text.size();
  const char* const after = std::from_chars(text.data(), end, target.capability).ptr;
  target.is_specific = after != end && *after == 'a';
  target.is_family = after != end && *after == 'f';
  return target;
}

}  // namespace sonicmoe::emulator
