// Words, numbers and punctuation of PTX text.
#pragma once

#include <string>
#include <string_view>

namespace sonicmoe::emulator {

struct Token {
  enum class Kind { kWord, kNumber, kString, kPunctuation, kEnd };
  Kind kind = Kind::kEnd;
  std::string_view text;
  int line = 0;

  bool is(std::string_view expected) const { return text == expected && kind != Kind::kString; }
};

/// Reads one token after the other. A word is an opcode with its parts, a name, a register or a
/// directive.
class Lexer {
 public:
  /// `line` is the number of the text's first line.
  explicit Lexer(std::string_view text, int line = 1) : text_(text), line_(line) { advance(); }

  const Token& peek() const { return token_; }
  Token take();
  /// Takes the token if it is `text`.
  bool accept(std::string_view text);
  /// Throws std::runtime_error if the token is not `text`.
  void expect(std::string_view text);
  /// Takes everything from the next "{" to its "}", and returns where the rest of the text begins.
  const char* skip_braces();
  /// Throws std::runtime_error with the line of the next token.
  [[noreturn]] void fail(const std::string& what) const;

 private:
  void advance();
  void skip_blanks();

  std::string_view text_;
  std::size_t at_ = 0;
  int line_;
  Token token_;
};

}  // namespace sonicmoe::emulator
