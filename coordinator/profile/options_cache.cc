// Options of what is kept of replies: the prefix cache and states on disk.
#include "coordinator/profile/options_internal.h"

namespace tensorfold::profile_table {
namespace {

Options cache_options() {
  using C = Profile::Cache;
  return {
      {.key = "cache.enabled",
       .type = Type::kBool,
       .field = at<&Profile::cache, &C::enabled>,
       .fallback = "true",
       .help =
           "Keep what prompts and replies have computed in pages that nobody needs, and start later requests with the "
           "same beginning from there. Replies do not depend on it.",
       .example = "false"},
      {.key = "cache.snapshot_bytes",
       .type = Type::kSize,
       .field = at<&Profile::cache, &C::snapshot_bytes>,
       .fallback = "256MiB",
       .min = 0,
       .max = 16 * kTiB,
       .unit = "bytes",
       .help =
           "Memory on each rank for snapshots of recurrent states, which models with linear attention need to start "
           "from a cached prefix. Taken at the start. 0: such models read every prompt from its beginning.",
       .example = "4GiB",
       .cluster_wide = true},
      {.key = "cache.snapshot_tokens",
       .type = Type::kInteger,
       .field = at<&Profile::cache, &C::snapshot_tokens>,
       .fallback = "2048",
       .min = 0,
       .max = 1 << 20,
       .unit = "tokens",
       .help =
           "A long prompt leaves a snapshot every so many tokens, besides the one at its last page and the one at the "
           "end of its reply. A multiple of 64; 0: only those two.",
       .example = "4096"},
  };
}

Options state_options() {
  using S = Profile::State;
  return {
      {.key = "state.directory",
       .type = Type::kPath,
       .field = at<&Profile::state, &S::directory>,
       .help = "Folder in which each rank keeps states on disk: cached prefixes are written there in the background "
               "and are "
               "still there after a restart. Not set: nothing is written.",
       .example = "/var/lib/tensorfold/state"},
      {.key = "state.quota",
       .type = Type::kSize,
       .field = at<&Profile::state, &S::quota>,
       .fallback = "16GiB",
       .min = kMiB,
       .max = 1024 * kTiB,
       .unit = "bytes",
       .help = "The most that a rank keeps there. The least recently used states go first; pinned ones stay.",
       .example = "200GiB"},
      {.key = "state.min_tokens",
       .type = Type::kInteger,
       .field = at<&Profile::state, &S::min_tokens>,
       .fallback = "1024",
       .min = 64,
       .max = 1 << 26,
       .unit = "tokens",
       .help = "Shorter prefixes are not written, and not read if they save less than this: computing them again is as "
               "fast.",
       .example = "4096"},
  };
}

}  // namespace

Options cache_side_options() { return joined({cache_options(), state_options()}); }

}  // namespace tensorfold::profile_table
