// The table of options, what is generated from it, and the profiles that ship.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <climits>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "coordinator/profile/options.h"
#include "coordinator/profile/profile.h"
#include "coordinator/profile/values.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string read_source_file(const std::string& path) {
  std::ifstream file(std::string(TENSORFOLD_SOURCE_DIR) + "/" + path);
  EXPECT_TRUE(file.good()) << path;
  return (std::ostringstream() << file.rdbuf()).str();
}

bool is_numeric(ProfileValueType type) {
  return type == ProfileValueType::kInteger || type == ProfileValueType::kNumber ||
         type == ProfileValueType::kDuration || type == ProfileValueType::kSize || type == ProfileValueType::kRate;
}

// Protects the table: every option is documented, unique, in a known section, and numbers say what they count.
TEST(ProfileTable, EveryOptionIsComplete) {
  std::set<std::string> keys;
  for (const ProfileOption& option : profile_options()) {
    SCOPED_TRACE(option.key);
    EXPECT_TRUE(keys.insert(option.key).second) << "declared twice";
    EXPECT_TRUE(is_profile_section(option.key.substr(0, option.key.rfind('.'))));
    EXPECT_FALSE(is_profile_section(option.key));
    EXPECT_GT(option.help.size(), 20u);
    EXPECT_EQ(option.help.back(), '.');
    EXPECT_FALSE(option.example.empty());
    EXPECT_FALSE(allowed_values_text(option).empty());
    if (is_numeric(option.type)) {
      EXPECT_FALSE(option.unit.empty());
      EXPECT_FALSE(option.fallback.empty());
    }
  }
  for (const ProfileSection& section : profile_sections()) EXPECT_FALSE(section.help.empty()) << section.key;
}

// Protects against two options that write to one field, and against ranges that an int field cannot hold.
TEST(ProfileTable, FieldsAreDistinctAndWideEnough) {
  Profile profile;
  std::set<const void*> fields;
  for (const ProfileOption& option : profile_options()) {
    SCOPED_TRACE(option.key);
    const ProfileField field = option.field(profile);
    EXPECT_TRUE(fields.insert(std::visit([](auto* p) -> const void* { return p; }, field)).second);
    if (std::holds_alternative<int*>(field)) {
      EXPECT_LE(option.max, INT_MAX);
      EXPECT_GE(option.min, INT_MIN);
    }
  }
}

// Protects defaults: each is accepted by its own option and printed as it was declared.
TEST(ProfileTable, DefaultsAreAccepted) {
  const Profile profile = default_profile();
  for (const ProfileOption& option : profile_options()) {
    SCOPED_TRACE(option.key);
    EXPECT_EQ(option_value_text(option, profile), option.fallback == "60s" ? "1m" : option.fallback);
    if (option.fallback.empty()) continue;
    YamlNode node;
    node.kind = YamlNode::Kind::kScalar;
    node.text = option.fallback;
    Profile scratch = default_profile();
    EXPECT_FALSE(read_option_value(option, node, {}, &scratch).has_value());
  }
}

// Protects examples: each, alone in a profile, is read without an error of its own.
TEST(ProfileTable, ExamplesAreAccepted) {
  for (const ProfileOption& option : profile_options()) {
    SCOPED_TRACE(option.key);
    std::string text, indent;
    std::istringstream parts(option.key);
    for (std::string part; std::getline(parts, part, '.'); indent += "  ")
      text += (text.empty() ? "" : ":\n") + indent + part;
    text += ": " + option.example + "\n";
    Profile profile;
    for (const ProfileError& error : check_profile(text, "p.yaml", &profile)) {
      const bool own_value = error.key == option.key && !error.allowed.empty();
      EXPECT_FALSE(own_value) << profile_error_text(error, "p.yaml");
    }
    EXPECT_NE(option_value_text(option, profile), "") << text;
  }
}

// Protects docs/profiles.md: it is the table, word for word.
TEST(ProfileTable, ReferenceIsUpToDate) {
  EXPECT_TRUE(read_source_file("docs/profiles.md") == reference_markdown())
      << "docs/profiles.md is stale. Regenerate it: tensorfold profile reference > docs/profiles.md";
}

// Protects the reference against holes: every option, section and rule is in it.
TEST(ProfileTable, ReferenceNamesEveryOption) {
  const std::string text = reference_markdown();
  for (const ProfileSection& section : profile_sections()) EXPECT_THAT(text, HasSubstr("\n## " + section.key + "\n"));
  for (const ProfileOption& option : profile_options()) {
    EXPECT_THAT(text, HasSubstr("\n| `" + option.key.substr(option.key.rfind('.') + 1) + "` | "));
  }
}

// Protects the profiles that ship: they load without errors or warnings, and the demo's model is where it says.
TEST(ShippedProfiles, PassCheck) {
  int count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(TENSORFOLD_SOURCE_DIR) + "/deploy/profiles")) {
    if (entry.path().extension() != ".yaml") continue;
    ++count;
    const auto profile = load_profile(entry.path().string());
    ASSERT_TRUE(profile.ok()) << profile.status();
    EXPECT_THAT(profile->warnings, ::testing::IsEmpty()) << entry.path();
  }
  EXPECT_GE(count, 4);
}

// Protects what quickstart relies on.
TEST(ShippedProfiles, DemoTwoRanks) {
  const std::string root = TENSORFOLD_SOURCE_DIR;
  const auto p = load_profile(root + "/deploy/profiles/demo-2rank.yaml");
  ASSERT_TRUE(p.ok()) << p.status();
  EXPECT_EQ(p->model.path, root + "/deploy/models/sprout");
  EXPECT_EQ(p->model.served_name, "sprout");
  EXPECT_EQ(p->cluster.world, 2);
  EXPECT_EQ(p->cluster.transport, "ucx");
  EXPECT_EQ(host_port_text(p->cluster.coordinator), "127.0.0.1:7070");
  EXPECT_EQ(host_port_text(p->http.listen), "127.0.0.1:8000");
  EXPECT_EQ(host_port_text(p->grpc.listen), "127.0.0.1:8001");
  EXPECT_EQ(p->compute.threads, 1);
  EXPECT_EQ(p->draft.kind, "auto");
}

// Protects explain: value, source, and no secrets.
TEST(ProfileExplain, SaysWhereEachValueComesFrom) {
  const auto profile = parse_profile("model:\n  path: m\ncluster:\n  token: 0123456789abcdefSECRET\n", "p.yaml");
  ASSERT_TRUE(profile.ok()) << profile.status();
  const auto text = explain_profile(*profile);
  ASSERT_TRUE(text.ok());
  for (const ProfileOption& option : profile_options()) EXPECT_THAT(*text, HasSubstr("\n" + option.key + " = "));
  EXPECT_THAT(*text, ::testing::ContainsRegex("model.path = m +line 2\n"));
  EXPECT_THAT(*text, ::testing::ContainsRegex("model.served_name = m +default, from model.path\n"));
  EXPECT_THAT(*text, ::testing::ContainsRegex("cluster.world = 1 +default\n"));
  EXPECT_THAT(*text, ::testing::ContainsRegex("cluster.token = .set, not shown. +line 4\n"));
  EXPECT_THAT(*text, Not(HasSubstr("SECRET")));
}

// Protects the KEY argument: one option, one section, or a suggestion.
TEST(ProfileExplain, OneKeyOrSection) {
  const Profile profile = default_profile();
  EXPECT_THAT(*explain_profile(profile, "cluster.world"), Not(HasSubstr("cluster.transport")));
  EXPECT_THAT(*explain_profile(profile, "cluster"), HasSubstr("cluster.ucx.tls = none"));
  EXPECT_EQ(std::string(explain_profile(profile, "cluster.wrld").status().message()),
            "\"cluster.wrld\": no such option or section; did you mean cluster.world?");
}

}  // namespace
}  // namespace tensorfold
