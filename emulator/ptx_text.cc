#include "ptx_text.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "ptx_lexer.h"

namespace sonicmoe::emulator {
namespace {

std::int64_t number_of(const Lexer& lexer, std::string_view text, bool negative) {
  int base = 10;
  if (text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  }
  if (text.ends_with('U')) text.remove_suffix(1);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc{} || end != text.data() + text.size()) lexer.fail("no number");
  return static_cast<std::int64_t>(negative ? ~value + 1 : value);
}

int bytes_of_type(std::string_view type) {  // .b32
  std::size_t digits = type.find_first_of("0123456789");
  int bits = 0;
  if (digits == std::string_view::npos) return 0;
  std::from_chars(type.data() + digits, type.data() + type.size(), bits);
  return bits / 8;
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t dot = text.find('.');
    parts.emplace_back(text.substr(0, dot));
    if (dot == std::string_view::npos) return parts;
    text.remove_prefix(dot + 1);
  }
}

class Parser {
 public:
  explicit Parser(std::string_view text, int line = 1) : lexer_(text, line) {}

  Module parse() {
    while (lexer_.peek().kind != Token::Kind::kEnd) parse_top();
    return std::move(module_);
  }

  /// The text must be that of one kernel (KernelText::text).
  Function parse_kernel(const std::vector<Variable>& outside) {
    parse_head();
    scopes_.assign(1, {});
    while (!scopes_.empty()) parse_line();
    take_shared_variables(outside);
    return std::move(function_);
  }

 private:
  /// A pair of braces: the unique names of what is declared inside.
  struct Scope {
    std::map<std::string, std::string, std::less<>> registers;
    std::map<std::string, std::string, std::less<>> labels;
    std::size_t begin = 0;  ///< first statement inside
  };

  void parse_top() {
    const Token token = lexer_.take();
    if (token.is(".entry")) return skip_kernel();
    if (token.is(".func")) return skip_function();
    if (token.is(".global") || token.is(".const") || token.is(".shared")) {
      module_.variables.push_back(parse_variable(token.text.substr(1)));
      return lexer_.expect(";");
    }
    if (token.is(".version") || token.is(".target") || token.is(".address_size")) {
      lexer_.take();
      while (lexer_.accept(",")) lexer_.take();
      return;
    }
    if (token.is(".pragma")) {
      lexer_.take();
      return lexer_.expect(";");
    }
    if (token.is(".visible") || token.is(".extern") || token.is(".weak")) return;
    lexer_.fail("unknown directive '" + std::string(token.text) + "'");
  }

  void skip_kernel() {
    const Token name = lexer_.peek();
    const char* const begin = name.text.data();
    module_.kernels.push_back({name.text, {begin, lexer_.skip_braces()}, name.line});
  }

  /// A function with a body, or the declaration of one.
  void skip_function() {
    while (!lexer_.peek().is("{")) {
      if (lexer_.accept(";")) return;
      if (lexer_.take().kind == Token::Kind::kEnd) lexer_.fail("a function has no end");
    }
    lexer_.skip_braces();
  }

  /// [.align N] .type name [N] [= values], after the space.
  Variable parse_variable(std::string_view space) {
    Variable v;
    v.space = space;
    int element = 0;
    while (lexer_.peek().text.starts_with('.')) {
      const Token token = lexer_.take();
      if (token.is(".align")) {
        v.alignment = number_of(lexer_, lexer_.take().text, false);
      } else if (!token.is(".ptr") && !token.is(".global") && !token.is(".attribute")) {
        element = bytes_of_type(token.text);
      }
    }
    v.name = lexer_.take().text;
    v.alignment = std::max<std::int64_t>(v.alignment, element);
    v.bytes = element;
    if (lexer_.accept("[")) {
      v.bytes = lexer_.peek().is("]") ? 0 : number_of(lexer_, lexer_.take().text, false) * element;
      lexer_.expect("]");
    }
    if (lexer_.accept("=")) parse_initial(element, &v);
    return v;
  }

  void parse_initial(int element, Variable* v) {
    const bool list = lexer_.accept("{");
    do {
      const bool negative = lexer_.accept("-");
      const std::int64_t value = number_of(lexer_, lexer_.take().text, negative);
      for (int i = 0; i < element; ++i) {
        v->initial.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
      }
    } while (list && lexer_.accept(","));
    if (list) lexer_.expect("}");
  }

  /// The name, the parameters and the directives before the body.
  void parse_head() {
    function_.name = lexer_.take().text;
    if (lexer_.accept("(")) {
      while (!lexer_.accept(")")) {
        lexer_.expect(".param");
        function_.parameters.push_back(parse_variable("param"));
        lexer_.accept(",");
      }
    }
    while (!lexer_.peek().is("{")) {
      const Token token = lexer_.take();
      if (token.kind == Token::Kind::kEnd) lexer_.fail("a kernel has no body");
      if (token.is(".maxntid") || token.is(".reqntid")) {
        function_.most_threads = number_of(lexer_, lexer_.take().text, false);
        while (lexer_.accept(",")) {
          function_.most_threads *= number_of(lexer_, lexer_.take().text, false);
        }
      }
    }
    lexer_.take();
  }

  /// Shared variables may be declared outside; a kernel has those that it names.
  void take_shared_variables(const std::vector<Variable>& outside) {
    std::set<std::string_view> named;
    for (const Statement& s : function_.statements) {
      for (const Operand& o : s.operands) {
        if (o.kind == Operand::Kind::kSymbol) named.insert(o.name);
        if (o.kind == Operand::Kind::kAddress) named.insert(o.elements[0].name);
      }
    }
    for (const Variable& v : outside) {
      if (v.space == "shared" && named.contains(v.name)) function_.variables.push_back(v);
    }
  }

  void parse_line() {
    if (lexer_.accept("{")) {
      scopes_.push_back({{}, {}, function_.statements.size()});
    } else if (lexer_.accept("}")) {
      close_scope();
    } else if (lexer_.peek().text.starts_with('.')) {
      parse_declaration();
    } else {
      parse_statement();
    }
  }

  /// Gives the labels of the scope their unique names in the statements that were read in it.
  void close_scope() {
    const Scope& scope = scopes_.back();
    for (std::size_t i = scope.begin; !scope.labels.empty() && i < function_.statements.size();
         ++i) {
      for (Operand& o : function_.statements[i].operands) {
        if (o.kind != Operand::Kind::kSymbol) continue;
        const auto found = scope.labels.find(o.name);
        if (found != scope.labels.end()) o.name = found->second;
      }
    }
    scopes_.pop_back();
  }

  void parse_declaration() {
    const Token token = lexer_.take();
    if (token.is(".reg")) {
      parse_registers(lexer_.take().text.substr(1));
    } else if (token.is(".local") || token.is(".shared")) {
      function_.variables.push_back(parse_variable(token.text.substr(1)));
    } else if (token.is(".pragma")) {
      lexer_.take();
    } else {
      lexer_.fail("unknown declaration '" + std::string(token.text) + "'");
    }
    lexer_.expect(";");
  }

  void parse_registers(std::string_view type) {
    do {
      const std::string name(lexer_.take().text);
      if (lexer_.accept("<")) {
        const std::int64_t count = number_of(lexer_, lexer_.take().text, false);
        lexer_.expect(">");
        for (std::int64_t i = 0; i < count; ++i) declare(name + std::to_string(i), type);
      } else {
        declare(name, type);
      }
    } while (lexer_.accept(","));
  }

  void declare(const std::string& name, std::string_view type) {
    const std::string unique =
        scopes_.size() == 1 ? name : name + "#" + std::to_string(function_.registers.size());
    scopes_.back().registers[name] = unique;
    function_.registers[unique] = type;
  }

  void parse_statement() {
    Statement s;
    s.line = lexer_.peek().line;
    if (lexer_.accept("@")) {
      const bool negated = lexer_.accept("!");
      s.guard = parse_operand();
      s.guard.negated = negated;
    }
    const Token word = lexer_.take();
    if (word.kind != Token::Kind::kWord) lexer_.fail("no instruction before");
    if (lexer_.accept(":")) return define_label(std::string(word.text));
    s.parts = split(word.text);
    while (!lexer_.accept(";")) {
      s.operands.push_back(parse_operand());
      if (!lexer_.peek().is(";")) lexer_.expect(",");
    }
    function_.statements.push_back(std::move(s));
  }

  void define_label(const std::string& name) {
    const std::string unique =
        scopes_.size() == 1 ? name : name + "#" + std::to_string(function_.labels.size());
    if (scopes_.size() > 1) scopes_.back().labels[name] = unique;
    function_.labels[unique] = function_.statements.size();
  }

  Operand parse_operand() {
    Operand o = parse_single();
    if (!lexer_.accept("|")) return o;
    Operand pair;
    pair.kind = Operand::Kind::kPair;
    pair.elements = {std::move(o), parse_single()};
    return pair;
  }

  Operand parse_single() {
    if (lexer_.accept("[")) return parse_address();
    if (lexer_.accept("{")) return parse_list("}");
    if (lexer_.accept("(")) return parse_list(")");
    if (lexer_.accept("!")) {
      Operand o = parse_single();
      o.negated = true;
      return o;
    }
    const bool negative = lexer_.accept("-");
    const Token token = lexer_.take();
    if (token.kind == Token::Kind::kNumber) return number_operand(token.text, negative);
    if (token.kind != Token::Kind::kWord) lexer_.fail("no operand before");
    return name_operand(token.text);
  }

  Operand number_operand(std::string_view text, bool negative) {
    Operand o;
    if (text.starts_with("0f") || text.starts_with("0F") || text.starts_with("0d") ||
        text.starts_with("0D")) {
      o.kind = Operand::Kind::kFloat;
      o.bytes = text[1] == 'f' || text[1] == 'F' ? 4 : 8;
      o.value = number_of(lexer_, "0x" + std::string(text.substr(2)), false);
      if (negative) o.value ^= std::int64_t{1} << (8 * o.bytes - 1);
      return o;
    }
    o.kind = Operand::Kind::kInteger;
    o.value = number_of(lexer_, text, negative);
    return o;
  }

  Operand name_operand(std::string_view text) {
    Operand o;
    if (text == "_") return o;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->registers.find(text);
      if (found == scope->registers.end()) continue;
      o.kind = Operand::Kind::kRegister;
      o.name = found->second;
      return o;
    }
    o.kind = text.starts_with('%') ? Operand::Kind::kSpecial : Operand::Kind::kSymbol;
    o.name = text;
    return o;
  }

  Operand parse_address() {
    Operand o;
    o.kind = Operand::Kind::kAddress;
    o.elements.push_back(parse_single());
    if (lexer_.accept("+")) {
      const bool negative = lexer_.accept("-");
      o.value = number_of(lexer_, lexer_.take().text, negative);
    }
    if (lexer_.accept(",")) o.elements.push_back(parse_single());
    lexer_.expect("]");
    return o;
  }

  Operand parse_list(std::string_view end) {
    Operand o;
    o.kind = Operand::Kind::kVector;
    while (!lexer_.accept(end)) {
      o.elements.push_back(parse_single());
      lexer_.accept(",");
    }
    return o;
  }

  Lexer lexer_;
  Module module_;
  Function function_;
  std::vector<Scope> scopes_;
};

}  // namespace

bool Statement::has(std::string_view part) const {
  return std::find(parts.begin() + 1, parts.end(), part) != parts.end();
}

void Statement::leave_out() {
  if (opcode() == "mbarrier" && (has("try_wait") || has("test_wait"))) {
    Operand zero;
    zero.kind = Operand::Kind::kInteger;
    parts = {"setp", "eq", "u32"};
    operands = {operands.at(0), zero, zero};
  } else {
    parts = {"discard"};
    operands.clear();
  }
}

std::string Statement::text() const {
  std::string text = parts[0];
  for (std::size_t i = 1; i < parts.size(); ++i) text += "." + parts[i];
  return text;
}

Module parse_module(std::string_view text) { return Parser(text).parse(); }

Function parse_kernel(const Module& module, const KernelText& kernel) {
  return Parser(kernel.text, kernel.line).parse_kernel(module.variables);
}

}  // namespace sonicmoe::emulator
