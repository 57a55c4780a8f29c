#include <openssl/evp.h>

#include <algorithm>

#include "coordinator/profile/options.h"
#include "coordinator/profile/profile.h"
#include "coordinator/profile/suggest.h"
#include "coordinator/profile/values.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

std::string sha256_hex(const std::string& text) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  EVP_Digest(text.data(), text.size(), digest, &length, EVP_sha256(), nullptr);
  std::string hex;
  for (unsigned int i = 0; i < length; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

std::string source_text(const Profile& profile, size_t index) {
  const ProfileOption& option = profile_options()[index];
  if (profile.positions[index].line > 0) return fmt::format("line {}", profile.positions[index].line);
  if (option.key == "model.served_name" && !profile.model.served_name.empty()) return "default, from model.path";
  return "default";
}

// Indented by four and broken at spaces, for a terminal of 100 columns.
std::string wrapped(std::string_view text) {
  constexpr size_t kWidth = 96;
  std::string result;
  while (!text.empty()) {
    size_t end = text.size();
    if (end > kWidth) {
      end = text.rfind(' ', kWidth);
      if (end == std::string_view::npos || end == 0) end = std::min(text.find(' '), text.size());
    }
    result += fmt::format("    {}\n", text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

std::string explain_option(const Profile& profile, size_t index) {
  const ProfileOption& option = profile_options()[index];
  const std::string setting = fmt::format("{} = {}", option.key, shown_option_value(option, profile));
  std::string text = fmt::format("{:<58} {}\n", setting, source_text(profile, index));
  std::string fallback = option.fallback.empty() ? "none" : option.fallback;
  if (!option.default_note.empty()) fallback = option.default_note;
  text += wrapped(fmt::format("{}{}{}", allowed_values_text(option),
                              option.required ? "; required" : fmt::format("; default {}", fallback),
                              option.cluster_wide ? "; must agree on all ranks" : ""));
  return text + wrapped(option.help);
}

}  // namespace

std::string profile_hash(const Profile& profile) {
  // One line an option. Values are quoted where they hold anything but plain characters, so no value can pose as
  // another line.
  std::string canonical = "tensorfold profile 1\n";
  for (const ProfileOption& option : profile_options()) {
    if (option.cluster_wide) canonical += option.key + "=" + option_value_text(option, profile) + "\n";
  }
  return sha256_hex(canonical);
}

absl::StatusOr<std::string> explain_profile(const Profile& profile, const std::string& key) {
  if (!key.empty() && find_profile_option(key) < 0 && !is_profile_section(key)) {
    const std::string meant = suggest_profile_key(key);
    return absl::InvalidArgumentError(fmt::format("{}: no such option or section{}", quote_for_message(key),
                                                  meant.empty() ? "" : fmt::format("; did you mean {}?", meant)));
  }
  std::string text = fmt::format("# {}\n# profile hash {}\n", profile.origin, profile_hash(profile));
  for (size_t i = 0; i < profile_options().size(); ++i) {
    const std::string& name = profile_options()[i].key;
    if (key.empty() || name == key || name.starts_with(key + "."))
      text += fmt::format("\n{}", explain_option(profile, i));
  }
  return text;
}

}  // namespace tensorfold
