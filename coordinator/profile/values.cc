#include "coordinator/profile/values.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>
#include <utility>

#include "coordinator/profile/suggest.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

constexpr size_t kLongestText = 4096;
constexpr size_t kLongestList = 1024;

using Refusal = std::optional<ValueRefusal>;

struct Unit {
  std::string_view name;
  std::int64_t factor;
};
constexpr std::array<Unit, 5> kDurationUnits = {
    {{"h", 3'600'000'000}, {"m", 60'000'000}, {"s", 1'000'000}, {"ms", 1000}, {"us", 1}}};
constexpr std::array<Unit, 5> kSizeUnits = {
    {{"TiB", std::int64_t{1} << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}};

// A decimal integer, and nothing else: no plus sign, no leading zeros (YAML 1.1 reads 010 as eight), no underscores.
enum class IntegerFault { kNone, kNotAnInteger, kTooLarge };
IntegerFault read_integer(std::string_view text, std::int64_t* value) {
  const std::string_view digits = text.substr(text.substr(0, 1) == "-" ? 1 : 0);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string_view::npos)
    return IntegerFault::kNotAnInteger;
  if (digits.size() > 1 && digits[0] == '0') return IntegerFault::kNotAnInteger;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), *value);
  (void)end;
  return code == std::errc() ? IntegerFault::kNone : IntegerFault::kTooLarge;
}

std::string quantity_text(std::int64_t value, const std::array<Unit, 5>& units) {
  for (const Unit& unit : units) {
    if (value >= unit.factor && value % unit.factor == 0) return fmt::format("{}{}", value / unit.factor, unit.name);
  }
  return value == 0 && units[4].name == "us" ? "0s" : fmt::format("{}{}", value, units[4].name);
}

// "500ms", "8GiB": digits, then one of the units.
Refusal read_quantity(const ProfileOption& option, std::string_view text, const std::array<Unit, 5>& units,
                      std::int64_t* value) {
  const size_t split = std::min(text.size(), text.find_first_not_of("0123456789"));
  const std::string_view number = text.substr(0, split);
  std::string_view unit = text.substr(split);
  const bool size = units[0].name == "TiB";
  if (option.type == ProfileValueType::kRate && unit.ends_with("/s")) {
    unit.remove_suffix(2);
  } else if (option.type == ProfileValueType::kRate && text != "0") {
    return ValueRefusal{"wrong type"};
  }
  const auto known = std::find_if(units.begin(), units.end(), [&](const Unit& each) { return each.name == unit; });
  std::int64_t count = 0;
  const bool zero = text == "0";
  if (number.empty() || (known == units.end() && !zero)) {
    if (!number.empty() && unit.empty()) {
      return ValueRefusal{"a unit is missing", fmt::format("{}{}", number, size ? "MiB" : "s")};
    }
    if (size && !number.empty() && unit.size() == 2 && unit[1] == 'B') {
      return ValueRefusal{"units of 1000 are not accepted", fmt::format("{}{}iB", number, unit[0])};
    }
    return ValueRefusal{unit.substr(0, 1) == "." ? "whole numbers only: take a smaller unit" : "wrong type"};
  }
  const IntegerFault fault = read_integer(number, &count);
  if (fault == IntegerFault::kNotAnInteger) return ValueRefusal{"wrong type"};
  const std::int64_t factor = zero ? 1 : known->factor;
  if (fault == IntegerFault::kTooLarge || count > option.max / factor) return ValueRefusal{"out of range"};
  if (count * factor < option.min) return ValueRefusal{"out of range"};
  *value = count * factor;
  return std::nullopt;
}

Refusal read_bool(const YamlNode& node, bool* value) {
  if (!node.quoted && (node.text == "true" || node.text == "false")) {
    *value = node.text == "true";
    return std::nullopt;
  }
  static const std::map<std::string, std::string, std::less<>> kMeant = {
      {"yes", "true"},  {"on", "true"},     {"True", "true"},   {"TRUE", "true"}, {"1", "true"},    {"no", "false"},
      {"off", "false"}, {"False", "false"}, {"FALSE", "false"}, {"0", "false"},   {"true", "true"}, {"false", "false"}};
  const auto meant = kMeant.find(node.text);
  return ValueRefusal{node.quoted ? "wrong type: in quotes it is text" : "wrong type",
                      meant == kMeant.end() ? "" : meant->second};
}

Refusal read_integer_option(const ProfileOption& option, const YamlNode& node, std::int64_t* value) {
  std::int64_t number = 0;
  const IntegerFault fault = read_integer(node.text, &number);
  if (fault == IntegerFault::kNotAnInteger) return ValueRefusal{"wrong type"};
  if (node.quoted) return ValueRefusal{"wrong type: in quotes it is text", node.text.substr(0, 24)};
  if (fault == IntegerFault::kTooLarge || number < option.min || number > option.max)
    return ValueRefusal{"out of range"};
  *value = number;
  return std::nullopt;
}

Refusal read_number(const ProfileOption& option, const YamlNode& node, double* value) {
  const std::string& text = node.text;
  double number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  // from_chars also takes inf and nan, which are no setting.
  const bool decimal = text.find_first_not_of("-.0123456789eE+") == std::string::npos;
  if (!decimal || end != text.data() + text.size() || code == std::errc::invalid_argument)
    return ValueRefusal{"wrong type"};
  if (node.quoted) return ValueRefusal{"wrong type: in quotes it is text", text.substr(0, 24)};
  if (code != std::errc() || !std::isfinite(number) || number < option.low || number > option.high) {
    return ValueRefusal{"out of range"};
  }
  *value = number;
  return std::nullopt;
}

Refusal check_text(const ProfileOption& option, const YamlNode& node) {
  const std::string& text = node.text;
  if (text.size() > kLongestText) return ValueRefusal{fmt::format("longer than {} bytes", kLongestText), "", &node};
  if (!option.choices.empty()) {
    const auto& choices = option.choices;
    if (std::find(choices.begin(), choices.end(), text) != choices.end()) return std::nullopt;
    return ValueRefusal{"not one of the choices", nearest_name(text, choices), &node};
  }
  if (text.empty()) return ValueRefusal{"empty", "", &node};
  if (option.pattern != nullptr && !option.pattern->accepts(text)) return ValueRefusal{"not accepted", "", &node};
  return std::nullopt;
}

Refusal read_path(const YamlNode& node, const std::filesystem::path& folder, std::string* value) {
  const std::string& text = node.text;
  if (text.empty()) return ValueRefusal{"empty"};
  if (text.size() > kLongestText) return ValueRefusal{fmt::format("longer than {} bytes", kLongestText)};
  if (text[0] == '~') return ValueRefusal{"~ is not expanded: write the path out, or relative to the profile's folder"};
  if (text[0] == '$')
    return ValueRefusal{"variables are not expanded: write the path out, or relative to the profile's folder"};
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) return ValueRefusal{"control character in a path"};
  }
  std::string path = (folder / text).lexically_normal().string();
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  *value = std::move(path);
  return std::nullopt;
}

bool is_host(std::string_view host) {
  if (host.empty() || host.size() > 253) return false;
  const std::string text(host);
  unsigned char bytes[sizeof(in6_addr)];
  if (host.find(':') != std::string_view::npos) return inet_pton(AF_INET6, text.c_str(), bytes) == 1;
  if (host.find_first_not_of("0123456789.") == std::string_view::npos)
    return inet_pton(AF_INET, text.c_str(), bytes) == 1;
  for (const char c : host) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!letter && c != '.' && c != '-' && c != '_') return false;
  }
  // Resolvers read a last label that is a number as an IPv4 address, in forms (0x7f.1, 127.1) that no check here would
  // know.
  const std::string_view last = host.substr(host.rfind('.') + 1);
  const bool numeric = last.find_first_not_of("0123456789") == std::string_view::npos || last.starts_with("0x") ||
                       last.starts_with("0X");
  return host[0] != '-' && host[0] != '.' && !numeric;
}

Refusal read_address(const ProfileOption& option, std::string_view text, Profile::HostPort* value) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return ValueRefusal{"the port is missing"};
  std::string_view host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const bool has_colon = host.find(':') != std::string_view::npos;
  if (has_colon && !bracketed) return ValueRefusal{"an IPv6 address needs brackets before its port"};
  if (bracketed != has_colon || !is_host(host)) return ValueRefusal{"not a host name or address before the port"};
  std::int64_t port = 0;
  const IntegerFault fault = read_integer(text.substr(colon + 1), &port);
  if (fault == IntegerFault::kNotAnInteger) return ValueRefusal{"the port is not a number"};
  if (fault == IntegerFault::kTooLarge || port < option.min || port > option.max)
    return ValueRefusal{"port out of range"};
  *value = {std::string(host), static_cast<int>(port)};
  return std::nullopt;
}

// Entries of a list, or of a map from rank to entry, in rank order.
Refusal list_entries(const ProfileOption& option, const YamlNode& node, std::vector<const YamlNode*>* entries) {
  if (node.items.size() > kLongestList) return ValueRefusal{fmt::format("more than {} entries", kLongestList)};
  if (node.kind == YamlNode::Kind::kList) {
    for (const YamlNode& item : node.items) entries->push_back(&item);
    return std::nullopt;
  }
  if (node.kind != YamlNode::Kind::kMap || option.type != ProfileValueType::kPerRank) return ValueRefusal{"wrong type"};
  entries->assign(node.items.size(), nullptr);
  for (size_t i = 0; i < node.items.size(); ++i) {
    std::int64_t rank = 0;
    if (read_integer(node.keys[i].text, &rank) != IntegerFault::kNone) {
      return ValueRefusal{fmt::format("{} is not a rank", quote_for_message(node.keys[i].text)), "", &node.items[i]};
    }
    // Keys are distinct, so ranks inside 0..n-1 fill every place.
    if (rank < 0 || rank >= static_cast<std::int64_t>(node.items.size())) {
      const size_t count = node.items.size();
      return ValueRefusal{
          fmt::format("rank {} does not fit {} entries: ranks count from 0 and none may be left out", rank, count), "",
          &node.items[i]};
    }
    (*entries)[rank] = &node.items[i];
  }
  return std::nullopt;
}

Refusal read_list(const ProfileOption& option, const YamlNode& node, std::vector<std::string>* value) {
  std::vector<const YamlNode*> entries;
  if (auto refusal = list_entries(option, node, &entries)) return refusal;
  std::vector<std::string> texts;
  for (const YamlNode* entry : entries) {
    if (entry->kind != YamlNode::Kind::kScalar) return ValueRefusal{"wrong type in the list", "", entry};
    if (auto refusal = check_text(option, *entry)) return refusal;
    if (option.unique && std::find(texts.begin(), texts.end(), entry->text) != texts.end()) {
      return ValueRefusal{"listed twice", "", entry};
    }
    texts.push_back(entry->text);
  }
  *value = std::move(texts);
  return std::nullopt;
}

Refusal read_scalar(const ProfileOption& option, const YamlNode& node, const std::filesystem::path& folder,
                    ProfileField field) {
  std::int64_t number = 0;
  Refusal refusal;
  switch (option.type) {
    case ProfileValueType::kBool:
      return read_bool(node, std::get<bool*>(field));
    case ProfileValueType::kNumber:
      return read_number(option, node, std::get<double*>(field));
    case ProfileValueType::kString:
      refusal = check_text(option, node);
      if (!refusal) *std::get<std::string*>(field) = node.text;
      return refusal;
    case ProfileValueType::kPath:
      return read_path(node, folder, std::get<std::string*>(field));
    case ProfileValueType::kAddress:
      return read_address(option, node.text, std::get<Profile::HostPort*>(field));
    case ProfileValueType::kDuration:
      refusal = read_quantity(option, node.text, kDurationUnits, &number);
      if (!refusal) *std::get<Profile::Duration*>(field) = Profile::Duration(number);
      return refusal;
    case ProfileValueType::kSize:
    case ProfileValueType::kRate:
      refusal = read_quantity(option, node.text, kSizeUnits, &number);
      break;
    default:
      refusal = read_integer_option(option, node, &number);
  }
  if (refusal) return refusal;
  if (auto* small = std::get_if<int*>(&field)) {
    **small = static_cast<int>(number);  // the option's range is inside int: a test checks the table
  } else {
    *std::get<std::int64_t*>(field) = number;
  }
  return std::nullopt;
}

std::string quoted_if_needed(const std::string& text) {
  const bool plain = !text.empty() && text.find_first_of(":#{}[],&*!|>'\"%@` \\") == std::string::npos;
  return plain ? text : quote_for_message(text, std::string::npos);
}

}  // namespace

std::optional<ValueRefusal> read_option_value(const ProfileOption& option, const YamlNode& node,
                                              const std::filesystem::path& folder, Profile* profile) {
  const ProfileField field = option.field(*profile);
  if (node.kind == YamlNode::Kind::kNull) return ValueRefusal{"no value"};
  if (auto* list = std::get_if<std::vector<std::string>*>(&field)) {
    if (node.kind == YamlNode::Kind::kScalar)
      return ValueRefusal{"wrong type", fmt::format("[{}]", node.text.substr(0, 40))};
    return read_list(option, node, *list);
  }
  if (node.kind != YamlNode::Kind::kScalar) return ValueRefusal{"wrong type"};
  return read_scalar(option, node, folder, field);
}

void set_option_default(const ProfileOption& option, Profile* profile) {
  if (option.fallback.empty()) {
    const ProfileField field = option.field(*profile);
    if (auto* text = std::get_if<std::string*>(&field)) (*text)->clear();
    if (auto* list = std::get_if<std::vector<std::string>*>(&field)) (*list)->clear();
    return;
  }
  YamlNode node;
  node.kind = YamlNode::Kind::kScalar;
  node.text = option.fallback;
  // A default that its own option refuses would be a mistake in the table; a test reads every default.
  (void)read_option_value(option, node, {}, profile);
}

std::string option_value_text(const ProfileOption& option, const Profile& profile) {
  // Fields are reached by one accessor for reading and writing; nothing is written through it here.
  const ProfileField field = option.field(const_cast<Profile&>(profile));
  const auto integer = [&]() -> std::int64_t {
    auto* small = std::get_if<int*>(&field);
    return small != nullptr ? **small : *std::get<std::int64_t*>(field);
  };
  std::string joined;
  switch (option.type) {
    case ProfileValueType::kBool:
      return *std::get<bool*>(field) ? "true" : "false";
    case ProfileValueType::kInteger:
      return fmt::format("{}", integer());
    case ProfileValueType::kNumber:
      return fmt::format("{}", *std::get<double*>(field));
    case ProfileValueType::kDuration:
      return quantity_text(std::get<Profile::Duration*>(field)->count(), kDurationUnits);
    case ProfileValueType::kSize:
      return quantity_text(integer(), kSizeUnits);
    case ProfileValueType::kRate:
      return quantity_text(integer(), kSizeUnits) + "/s";
    case ProfileValueType::kAddress:
      return host_port_text(*std::get<Profile::HostPort*>(field));
    case ProfileValueType::kString:
    case ProfileValueType::kPath:
      return std::get<std::string*>(field)->empty() ? "" : quoted_if_needed(*std::get<std::string*>(field));
    case ProfileValueType::kList:
    case ProfileValueType::kPerRank:
      for (const std::string& entry : *std::get<std::vector<std::string>*>(field)) {
        joined += fmt::format("{}{}", joined.empty() ? "" : ", ", quoted_if_needed(entry));
      }
      return joined.empty() ? "" : fmt::format("[{}]", joined);
  }
  return "";
}

std::string shown_option_value(const ProfileOption& option, const Profile& profile) {
  const std::string text = option_value_text(option, profile);
  if (text.empty()) return "none";
  if (!option.secret) return text;
  const ProfileField field = option.field(const_cast<Profile&>(profile));
  if (auto* list = std::get_if<std::vector<std::string>*>(&field))
    return fmt::format("({} set, not shown)", (*list)->size());
  return "(set, not shown)";
}

std::string allowed_values_text(const ProfileOption& option) {
  const std::string unit = option.unit.empty() ? "" : fmt::format(" ({})", option.unit);
  const bool open_ended = option.max == std::numeric_limits<std::int64_t>::max();
  std::string entry = option.pattern == nullptr ? "text" : std::string(option.pattern->words);
  if (!option.choices.empty()) {
    entry = option.choices.size() > 1 ? "one of" : "only";
    for (size_t i = 0; i < option.choices.size(); ++i)
      entry += fmt::format("{}{}", i == 0 ? " " : ", ", option.choices[i]);
  }
  switch (option.type) {
    case ProfileValueType::kBool:
      return "true or false";
    case ProfileValueType::kInteger:
      if (open_ended) return fmt::format("an integer, {} or more{}", option.min, unit);
      return fmt::format("an integer from {} to {}{}", option.min, option.max, unit);
    case ProfileValueType::kNumber:
      return fmt::format("a number from {} to {}{}", option.low, option.high, unit);
    case ProfileValueType::kDuration:
      return fmt::format("a duration from {} to {}, as in 500ms, 2s, 5m, 1h", quantity_text(option.min, kDurationUnits),
                         quantity_text(option.max, kDurationUnits));
    case ProfileValueType::kSize:
      return fmt::format("a size from {} to {}, as in 64KiB, 512MiB, 8GiB", quantity_text(option.min, kSizeUnits),
                         quantity_text(option.max, kSizeUnits));
    case ProfileValueType::kRate:
      return fmt::format("a rate from {}/s to {}/s, as in 10GiB/s", quantity_text(option.min, kSizeUnits),
                         quantity_text(option.max, kSizeUnits));
    case ProfileValueType::kPath:
      return "a path, absolute or relative to the profile's folder";
    case ProfileValueType::kAddress:
      return fmt::format("host:port with a port from {} to {}, as in 127.0.0.1:7070 or [::1]:7070", option.min,
                         option.max);
    case ProfileValueType::kList:
      return fmt::format("a list, each entry {}", entry);
    case ProfileValueType::kPerRank:
      return fmt::format("a list in rank order, or a map from rank to entry; each entry {}", entry);
    case ProfileValueType::kString:
      break;
  }
  return entry;
}

std::string found_text(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kScalar:
      return quote_for_message(node.text);
    case YamlNode::Kind::kList:
      return "a list";
    case YamlNode::Kind::kMap:
      return "a map";
    default:
      return "nothing";
  }
}

std::string host_port_text(const Profile::HostPort& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", address.host, address.port) : fmt::format("{}:{}", address.host, address.port);
}

// The four bytes of an IPv4 address, also one written as IPv6 (::ffff:1.2.3.4); false for anything else.
static bool read_ipv4(const std::string& host, unsigned char (&bytes)[4]) {
  unsigned char six[16];
  if (inet_pton(AF_INET, host.c_str(), bytes) == 1) return true;
  if (inet_pton(AF_INET6, host.c_str(), six) != 1) return false;
  const bool mapped =
      std::all_of(six, six + 10, [](unsigned char b) { return b == 0; }) && six[10] == 0xFF && six[11] == 0xFF;
  std::copy(six + 12, six + 16, bytes);
  return mapped;
}

bool is_loopback_host(std::string_view host) {
  const std::string text(host);
  unsigned char four[4], six[16];
  if (text == "localhost") return true;
  if (read_ipv4(text, four)) return four[0] == 127;
  if (inet_pton(AF_INET6, text.c_str(), six) != 1) return false;
  return std::all_of(six, six + 15, [](unsigned char b) { return b == 0; }) && six[15] == 1;
}

bool is_any_address(std::string_view host) {
  const std::string text(host);
  unsigned char four[4], six[16];
  const auto zero = [](unsigned char b) { return b == 0; };
  if (read_ipv4(text, four)) return std::all_of(four, four + 4, zero);
  return inet_pton(AF_INET6, text.c_str(), six) == 1 && std::all_of(six, six + 16, zero);
}

bool is_cluster_token(std::string_view text) {
  if (text.size() < 16 || text.size() > 256) return false;
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return c > 0x20 && c < 0x7F; });
}

bool is_sha256_hex(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdefABCDEF") == std::string_view::npos;
}

}  // namespace tensorfold
