#include "ptx_lexer.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace sonicmoe::emulator {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' ||
         c == '.';
}

}  // namespace

Token Lexer::take() {
  const Token taken = token_;
  advance();
  return taken;
}

bool Lexer::accept(std::string_view text) {
  if (!token_.is(text)) return false;
  advance();
  return true;
}

void Lexer::expect(std::string_view text) {
  if (!accept(text)) fail("expected '" + std::string(text) + "'");
}

const char* Lexer::skip_braces() {
  while (!token_.is("{")) {
    if (token_.kind == Token::Kind::kEnd) fail("expected '{'");
    advance();
  }
  for (int depth = 1; depth > 0; ++at_) {  // at_ is behind the brace
    at_ = text_.find_first_of("{}/\n", at_);
    if (at_ == text_.npos) {
      at_ = text_.size();
      advance();
      fail("expected '}'");
    }
    const char c = text_[at_];
    line_ += c == '\n';
    depth += c == '{';
    depth -= c == '}';
    if (text_.substr(at_, 2) == "//") at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
  }
  const char* const end = text_.data() + at_;
  advance();
  return end;
}

void Lexer::fail(const std::string& what) const {
  throw std::runtime_error("PTX line " + std::to_string(token_.line) + ": " + what +
                           (token_.kind == Token::Kind::kEnd
                                ? std::string(" before the end")
                                : " at '" + std::string(token_.text) + "'") +
                           ".");
}

void Lexer::skip_blanks() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '\n') ++line_;
    if (std::isspace(static_cast<unsigned char>(c)) || c == '\0') {
      ++at_;
    } else if (text_.substr(at_, 2) == "//") {
      at_ = std::min(text_.find('\n', at_), text_.size());
    } else if (text_.substr(at_, 2) == "/*") {
      const std::size_t end = std::min(text_.find("*/", at_), text_.size() - 2) + 2;
      for (; at_ < end; ++at_) line_ += text_[at_] == '\n';
    } else {
      return;
    }
  }
}

void Lexer::advance() {
  skip_blanks();
  token_ = {Token::Kind::kEnd, {}, line_};
  if (at_ >= text_.size()) return;
  const std::size_t begin = at_;
  const char first = text_[at_];
  if (first == '"') {
    at_ = std::min(text_.find('"', at_ + 1), text_.size() - 1) + 1;
    token_ = {Token::Kind::kString, text_.substr(begin, at_ - begin), line_};
    return;
  }
  if (!is_word(first)) {
    ++at_;
    token_ = {Token::Kind::kPunctuation, text_.substr(begin, 1), line_};
    return;
  }
  const bool number = std::isdigit(static_cast<unsigned char>(first)) != 0;
  while (at_ < text_.size()) {
    if (is_word(text_[at_])) {
      ++at_;
    } else if (!number && text_.substr(at_, 2) == "::") {
      at_ += 2;
    } else {
      break;
    }
  }
  token_ = {number ? Token::Kind::kNumber : Token::Kind::kWord, text_.substr(begin, at_ - begin),
            line_};
}

}  // namespace sonicmoe::emulator
