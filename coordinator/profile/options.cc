#include "coordinator/profile/options.h"

#include <algorithm>

#include "coordinator/profile/options_internal.h"

namespace tensorfold {

const std::vector<ProfileOption>& profile_options() {
  static const std::vector<ProfileOption> kOptions =
      profile_table::joined({profile_table::cluster_side_options(), profile_table::cache_side_options(),
                             profile_table::serving_side_options()});
  return kOptions;
}

const std::vector<ProfileSection>& profile_sections() {
  static const std::vector<ProfileSection> kSections = {
      {"model", "What is served."},
      {"cluster",
       "The ranks, how they find one another and how long they wait. Ranks start in any order with the same profile."},
      {"cluster.ucx", "The paths between ranks, for `transport: ucx`. At start every path is measured."},
      {"compute", "How each rank computes."},
      {"memory",
       "Memory of each rank. It is planned before weights are loaded; what does not fit is refused with the numbers."},
      {"cache", "What prompts and replies leave for later requests, in memory."},
      {"state", "The same on disk, on every rank."},
      {"schedule", "How requests share the cluster."},
      {"draft", "Speculative decoding. It changes how fast a reply comes and never what it says."},
      {"sampling", "What a request gets for the fields that it leaves out."},
      {"http", "The HTTP server, on rank 0."},
      {"grpc", "The gRPC server, on rank 0."},
      {"log", "The log, on standard error."},
      {"metrics", "Counters for Prometheus."},
  };
  return kSections;
}

int find_profile_option(std::string_view key) {
  const auto& options = profile_options();
  for (size_t i = 0; i < options.size(); ++i) {
    if (options[i].key == key) return static_cast<int>(i);
  }
  return -1;
}

bool is_profile_section(std::string_view key) {
  const auto& sections = profile_sections();
  return std::any_of(sections.begin(), sections.end(), [&](const ProfileSection& each) { return each.key == key; });
}

}  // namespace tensorfold
