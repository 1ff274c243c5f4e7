#include "registers.h"

#include <set>

namespace sonicmoe::emulator {
namespace {

/// Calls call(name, writes) for each register of the operand. `writes`: whether it may be a target.
template <class Call>
void for_each_register(const Operand& o, bool writes, const Call& call) {
  if (o.kind == Operand::Kind::kRegister) call(o.name, writes);
  for (const Operand& element : o.elements) {
    for_each_register(element, writes && o.kind != Operand::Kind::kAddress, call);
  }
}

/// Products and loads of tensor memory write their registers later than they run.
bool writes_later(const Statement& s) { return s.opcode() == "wgmma" || s.opcode() == "tcgen05"; }

}  // namespace

std::unordered_map<std::string_view, Lifetime> lifetimes_of(const Function& function) {
  std::set<std::size_t> labels;
  for (const auto& [name, place] : function.labels) labels.insert(place);
  std::unordered_map<std::string_view, Lifetime> lifetimes;
  std::size_t label = 0;  // the last one
  for (std::size_t at = 0; at < function.statements.size(); ++at) {
    const Statement& s = function.statements[at];
    if (labels.contains(at)) label = at;
    const bool is_whole = s.guard.kind == Operand::Kind::kDiscarded && !writes_later(s);
    const auto note = [&](std::string_view name, bool writes) {
      const auto [entry, is_new] =
          lifetimes.try_emplace(name, Lifetime{at, at, is_whole && writes});
      Lifetime& l = entry->second;
      l.last = at;
      if (is_new) return;
      const bool reads_what_it_writes = l.first == at;
      if (reads_what_it_writes || l.first < label || writes_later(s)) l.is_short = false;
    };
    for (std::size_t i = 0; i < s.operands.size(); ++i) {
      for_each_register(s.operands[i], i == 0, note);
    }
    for_each_register(s.guard, false, note);
  }
  return lifetimes;
}

}  // namespace sonicmoe::emulator
