#include "coordinator/profile/document.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

// Lengths of the UTF-8 sequence that starts at text[i]; 0 when it is malformed (overlong, surrogate, past U+10FFFF,
// cut).
int utf8_length(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[k]); };
  const unsigned lead = byte(i);
  if (lead < 0x80) return 1;
  int length = 0;
  unsigned low = 0x80, high = 0xBF;  // bounds of the second byte
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return 0;
  }
  if (i + length > text.size()) return 0;
  if (byte(i + 1) < low || byte(i + 1) > high) return 0;
  for (int k = 2; k < length; ++k) {
    if (byte(i + k) < 0x80 || byte(i + k) > 0xBF) return 0;
  }
  return length;
}

// The first byte that may not stand in a profile. yaml-cpp would guess UTF-16 or UTF-32 from zero bytes and byte order
// marks and replace bad sequences silently, so nothing of the kind may reach it.
std::optional<ProfileError> check_characters(std::string_view text) {
  ProfilePosition at{1, 1};
  for (size_t i = 0; i < text.size(); ++at.column) {
    const int length = utf8_length(text, i);
    const unsigned char c = text[i];
    if (length == 0) {
      return ProfileError{at, "", "the file is not UTF-8", fmt::format("byte 0x{:02x}", c), "UTF-8 text", ""};
    }
    if ((c < 0x20 && c != '\n' && c != '\t' && c != '\r') || c == 0x7F) {
      return ProfileError{at, "", "control character", fmt::format("byte 0x{:02x}", c), "printable text", ""};
    }
    i += length;
    if (c == '\n') at = {at.line + 1, 0};
  }
  return std::nullopt;
}

// Thrown through yaml-cpp to stop the parse; never leaves read_yaml.
struct Refused {
  ProfileError error;
};

class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(std::string_view text, std::vector<ProfileError>* errors) : text_(text), errors_(errors) {
    line_starts_.push_back(0);
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\n') line_starts_.push_back(i + 1);
    }
  }

  YamlNode take_root() { return std::move(root_); }

  // yaml-cpp counts from 0 and columns in bytes; people count from 1 and in characters.
  ProfilePosition position(const YAML::Mark& mark) const {
    if (mark.line < 0 || mark.column < 0) return {1, 1};
    const size_t line = std::min<size_t>(mark.line, line_starts_.size() - 1);
    const size_t start = line_starts_[line];
    const size_t end = std::min(text_.size(), start + mark.column);
    int column = 1;
    for (size_t i = start; i < end; ++i) column += (static_cast<unsigned char>(text_[i]) & 0xC0) != 0x80;
    return {static_cast<int>(line) + 1, column};
  }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (documents_++ > 0) refuse(mark, "a second YAML document", "one document a file: remove the --- line");
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    YamlNode node = new_node(YamlNode::Kind::kNull, mark);
    note_anchor(mark, anchor);
    add(std::move(node));
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    report(mark, "YAML aliases (*name) are not accepted", "write the value out");
    add(new_node(YamlNode::Kind::kRefused, mark));
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    const bool plain = tag == "?" || tag.empty();
    YamlNode node = new_node(YamlNode::Kind::kScalar, mark);
    node.quoted = !plain;
    node.text = value;
    note_anchor(mark, anchor);
    if (!plain && !is_closed(mark)) refuse(mark, "the quote is never closed", "the same quote at the end of the text");
    if (!plain && tag != "!") {
      report_tag(mark, tag);
      node.kind = YamlNode::Kind::kRefused;
    }
    add(std::move(node));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kList, mark, tag, anchor);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(YamlNode::Kind::kMap, mark, tag, anchor);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    YamlNode node;
    bool has_key = false;  // maps: the key is read, its value is next
    bool skip = false;     // the key is no good: drop its value
    YamlKey key = {};
    absl::flat_hash_map<std::string, int> lines = {};  // key → line where it stands
  };

  [[noreturn]] void refuse(const YAML::Mark& mark, std::string problem, std::string allowed) {
    throw Refused{ProfileError{position(mark), "", std::move(problem), "", std::move(allowed), ""}};
  }

  void report(const YAML::Mark& mark, std::string problem, std::string allowed) {
    errors_->push_back({position(mark), path(), std::move(problem), "", std::move(allowed), ""});
  }

  void report_tag(const YAML::Mark& mark, const std::string& tag) {
    errors_->push_back(
        {position(mark), path(), "YAML tags are not accepted", quote_for_message(tag), "the value without a tag", ""});
  }

  void note_anchor(const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor != 0) report(mark, "YAML anchors (&name) are not accepted", "write the value out where it is needed");
  }

  // Whether the quoted text that starts at `mark` ends in the file. yaml-cpp takes the end of the file for a closing
  // quote, so one that was forgotten would swallow the rest of the profile without a word.
  bool is_closed(const YAML::Mark& mark) const {
    if (mark.line < 0 || mark.line >= static_cast<int>(line_starts_.size())) return true;
    size_t i = line_starts_[mark.line] + mark.column;
    if (i >= text_.size() || (text_[i] != '"' && text_[i] != '\'')) return true;  // a block scalar
    const char quote = text_[i];
    for (++i; i < text_.size(); ++i) {
      if (text_[i] == '\\' && quote == '"') {
        ++i;
      } else if (text_[i] == quote) {
        if (quote == '"' || text_.substr(i + 1, 1) != "'") return true;
        ++i;
      }
    }
    return false;
  }

  // The key path of the value being read.
  std::string path() const {
    std::string result;
    for (const Frame& frame : stack_) {
      if (!frame.has_key) continue;
      if (!result.empty()) result += '.';
      result += frame.key.text;
    }
    return result;
  }

  YamlNode new_node(YamlNode::Kind kind, const YAML::Mark& mark) {
    if (++nodes_ > kMaxYamlNodes) {
      refuse(mark, "too many values", fmt::format("at most {} keys and values in a profile", kMaxYamlNodes));
    }
    YamlNode node;
    node.kind = kind;
    node.at = position(mark);
    return node;
  }

  void open(YamlNode::Kind kind, const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (static_cast<int>(stack_.size()) >= kMaxYamlDepth) {
      refuse(mark, "nested too deeply", fmt::format("at most {} levels of maps and lists", kMaxYamlDepth));
    }
    Frame frame;
    frame.node = new_node(kind, mark);
    note_anchor(mark, anchor);
    if (!tag.empty() && tag != "?" && tag != "!") report_tag(mark, tag);
    stack_.push_back(std::move(frame));
  }

  void close() {
    YamlNode node = std::move(stack_.back().node);
    stack_.pop_back();
    add(std::move(node));
  }

  void add(YamlNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return;
    }
    Frame& frame = stack_.back();
    if (frame.node.kind == YamlNode::Kind::kList) {
      frame.node.items.push_back(std::move(node));
      return;
    }
    if (!frame.has_key) {
      take_key(frame, std::move(node));
      return;
    }
    if (!frame.skip) {
      frame.node.keys.push_back(std::move(frame.key));
      frame.node.items.push_back(std::move(node));
    }
    frame.has_key = false;
  }

  void take_key(Frame& frame, YamlNode node) {
    const bool usable = node.kind == YamlNode::Kind::kScalar;
    const ProfilePosition at = node.at;
    frame.skip = !usable;
    std::string parent = path();
    frame.key = {usable ? std::move(node.text) : "?", at};
    frame.has_key = true;
    if (!usable && node.kind != YamlNode::Kind::kRefused) {
      errors_->push_back({at, parent, "a key must be plain text", found_kind(node.kind), "key: value", ""});
    }
    if (!usable) return;
    const auto [entry, inserted] = frame.lines.emplace(frame.key.text, at.line);
    if (!inserted) {
      frame.skip = true;
      errors_->push_back({at, path(), fmt::format("duplicate key, already set on line {}", entry->second), "", "", ""});
    }
  }

  static std::string found_kind(YamlNode::Kind kind) {
    if (kind == YamlNode::Kind::kList) return "a list";
    return kind == YamlNode::Kind::kMap ? "a map" : "nothing";
  }

  std::string_view text_;
  std::vector<ProfileError>* errors_;
  std::vector<size_t> line_starts_;
  std::vector<Frame> stack_;
  YamlNode root_;
  int documents_ = 0;
  int nodes_ = 0;
};

YamlNode parse_events(std::string_view text, std::vector<ProfileError>* errors) {
  TreeBuilder builder(text, errors);
  YamlNode refused;
  refused.kind = YamlNode::Kind::kRefused;
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
    return builder.take_root();
  } catch (const Refused& refusal) {
    errors->push_back(refusal.error);
  } catch (const YAML::Exception& e) {
    errors->push_back(
        {builder.position(e.mark), "", fmt::format("not valid YAML: {}", quote_for_message(e.msg)), "", "", ""});
  } catch (const std::exception& e) {
    errors->push_back({{1, 1}, "", fmt::format("cannot be read as YAML: {}", quote_for_message(e.what())), "", "", ""});
  }
  return refused;
}

}  // namespace

YamlNode read_yaml(std::string_view text, std::vector<ProfileError>* errors) {
  YamlNode refused;
  refused.kind = YamlNode::Kind::kRefused;
  if (static_cast<std::int64_t>(text.size()) > kMaxProfileBytes) {
    errors->push_back({{1, 1},
                       "",
                       "the file is too large",
                       fmt::format("{} bytes", text.size()),
                       fmt::format("at most {} bytes", kMaxProfileBytes),
                       ""});
    return refused;
  }
  if (text.substr(0, 3) == "\xEF\xBB\xBF") text.remove_prefix(3);  // a byte order mark says UTF-8, and nothing else
  if (auto error = check_characters(text)) {
    errors->push_back(*std::move(error));
    return refused;
  }
  return parse_events(text, errors);
}

std::string quote_for_message(std::string_view text, size_t shown) {
  std::string result = "\"";
  size_t i = 0;
  while (i < text.size() && i < shown) {
    const int length = utf8_length(text, i);
    const unsigned char c = text[i];
    if (length == 0 || c < 0x20 || c == 0x7F) {
      result += c == '\n' ? std::string("\\n") : fmt::format("\\x{:02x}", c);
      ++i;
    } else {
      if (c == '"' || c == '\\') result += '\\';
      result += text.substr(i, length);
      i += length;
    }
  }
  return result + (i < text.size() ? "…\"" : "\"");
}

}  // namespace tensorfold
