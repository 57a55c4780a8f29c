// YAML text to a tree with positions, within bounds. yaml-cpp's events are used rather than its nodes: a bound is then
// checked before memory is taken, and aliases are never expanded.
//
// Refused as a whole: not UTF-8, control characters, over kMaxProfileBytes, nesting over kMaxYamlDepth, over
// kMaxYamlNodes values, several documents, broken YAML. Reported one by one, the rest still read: duplicate keys,
// anchors, aliases, tags, keys that are not plain text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "coordinator/profile/profile.h"

namespace tensorfold {

inline constexpr int kMaxYamlDepth = 8;
inline constexpr int kMaxYamlNodes = 20000;

struct YamlKey {
  std::string text;
  ProfilePosition at;
};

struct YamlNode {
  enum class Kind {
    kNull,     // nothing after the colon, ~ or null
    kScalar,   // text
    kList,     // items
    kMap,      // keys[i] → items[i]
    kRefused,  // already reported; say nothing more about it
  };
  Kind kind = Kind::kNull;
  ProfilePosition at;
  bool quoted = false;  // a scalar in quotes or a block scalar: never a number or a boolean
  std::string text;
  std::vector<YamlKey> keys;
  std::vector<YamlNode> items;
};

// The document's root; kNull for an empty one. Errors are appended to `errors`; after a refusal the root is kRefused.
YamlNode read_yaml(std::string_view text, std::vector<ProfileError>* errors);

// A scalar in quotes and escaped, for a message shortened to about `shown` bytes.
std::string quote_for_message(std::string_view text, size_t shown = 60);

}  // namespace tensorfold
