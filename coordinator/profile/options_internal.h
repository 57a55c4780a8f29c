// What the declarations of options share. Only for options*.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/profile/options.h"

namespace tensorfold::profile_table {

using Type = ProfileValueType;
using Options = std::vector<ProfileOption>;

// Accessor of a member: at<&Profile::cluster, &Profile::Cluster::world>.
template <auto... Path>
ProfileField at(Profile& profile) {
  return &(profile.*....*Path);
}

inline constexpr std::int64_t kMillisecond = 1000;  // microseconds
inline constexpr std::int64_t kSecond = 1000 * kMillisecond;
inline constexpr std::int64_t kMinute = 60 * kSecond;
inline constexpr std::int64_t kHour = 60 * kMinute;
inline constexpr std::int64_t kKiB = 1 << 10;
inline constexpr std::int64_t kMiB = 1 << 20;
inline constexpr std::int64_t kGiB = 1 << 30;
inline constexpr std::int64_t kTiB = kGiB << 10;

inline bool is_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// Letters, digits and the characters of `also`.
inline bool consists_of(std::string_view text, std::string_view also) {
  return std::all_of(text.begin(), text.end(),
                     [&](char c) { return is_alphanumeric(c) || also.find(c) != std::string_view::npos; });
}

// The parts of the table, in its order.
Options cluster_side_options();  // model, cluster, compute, memory: options_cluster.cc
Options cache_side_options();    // cache, state: options_cache.cc
Options serving_side_options();  // schedule, draft, sampling, http, grpc, log, metrics: options_serving.cc

inline Options joined(std::vector<Options> parts) {
  Options all;
  for (Options& part : parts) {
    for (ProfileOption& option : part) all.push_back(std::move(option));
  }
  return all;
}

}  // namespace tensorfold::profile_table
