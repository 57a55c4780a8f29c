// Profiles: the YAML file that says what a cluster serves and how, as typed options.
//
// `Profile` is plain data. It comes from load_profile, parse_profile or default_profile; its members have no defaults
// of their own, because each option's default stands in one place, the table in options_*.cc. What each option means,
// its unit and its range are in that table too and, generated from it, in docs/profiles.md.
//
// Errors: one InvalidArgument status whose message has one line an error (at most kMaxProfileErrors, then a count):
//   FILE:LINE:COLUMN: KEY: PROBLEM: found VALUE; allowed: WHAT; did you mean KEY?
// Thread-safety: all functions may be called from any thread; a Profile is a value.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorfold {

inline constexpr std::int64_t kMaxProfileBytes = 1 << 20;  // a larger file is refused before it is read
inline constexpr int kMaxProfileErrors = 20;               // errors printed at once

// A place in a profile, counted from 1, columns in characters. Line 0: nowhere (the option has its default).
struct ProfilePosition {
  int line = 0;
  int column = 0;
};

// One thing that is wrong with a profile. Empty fields are left out when printed.
struct ProfileError {
  ProfilePosition at;
  std::string key;         // path, as in cluster.world
  std::string problem;     // what is wrong
  std::string found;       // the value as written, shortened
  std::string allowed;     // what may stand there
  std::string suggestion;  // a key or a choice that was probably meant
};

struct Profile {
  using Duration = std::chrono::microseconds;

  // Where a server listens or is reached.
  struct HostPort {
    std::string host;  // name, IPv4, or IPv6 without brackets
    int port = 0;
    bool operator==(const HostPort&) const = default;
  };

  struct Model {
    std::string path;                  // resolved against the profile's folder
    std::string served_name;           // never empty: the folder's name when not set
    std::vector<std::string> aliases;  // more names that requests may use
    std::int64_t context_length = 0;   // tokens; 0: the checkpoint's own
    std::string precision;             // "checkpoint" or "full"
    std::string kv_dtype;              // "auto", "f32", "bf16" or "fp8"; see kv_format()
  } model;

  struct Cluster {
    int world = 0;                   // ranks
    std::string transport;           // "local" or "ucx"
    std::vector<std::string> hosts;  // labels in rank order; empty or `world` entries
    HostPort coordinator;            // where ranks reach rank 0's control plane
    std::string bind;                // address that rank 0 listens on; empty: coordinator.host
    bool allow_any_address = false;
    std::string token;       // shared secret, or empty; use cluster_token() to read it
    std::string token_file;  // resolved path, or empty
    Duration join_timeout{};
    Duration step_timeout{};          // base; see step_deadline()
    Duration step_timeout_per_row{};  // added for each row of the pass
    Duration heartbeat_interval{};
    Duration heartbeat_timeout{};
    Duration park_deadline{};  // 0: requests fail at once when a rank is lost

    struct Ucx {
      std::vector<std::string> tls;          // UCX transport names; empty: UCX chooses
      std::vector<std::string> net_devices;  // empty: all; one entry: every rank; else one a rank
      std::string expect_transport;          // "any", "shm", "tcp" or "rdma"
      std::int64_t min_bandwidth = 0;        // bytes a second; 0: not checked
      std::string on_slow;                   // "warn" or "refuse"
    } ucx;

    // The longest that a pass of `rows` rows may take before the ranks it waits for are named.
    Duration step_deadline(std::int64_t rows) const { return step_timeout + step_timeout_per_row * rows; }
    // The transports as UCX's comma-separated list; empty: UCX chooses.
    std::string ucx_tls() const;
    // The network devices of one rank, as UCX's comma-separated list; empty: all.
    std::string net_devices_of(int rank) const;
    // "spark-2 (rank 1)", or "rank 1" without labels: how messages name a rank.
    std::string rank_name(int rank) const;
  } cluster;

  struct Compute {
    std::string backend;   // "cpu" or "cuda"
    int threads = 0;       // cpu; 0: all cores
    std::string isa;       // cpu; "auto", "avx512", "avx2", "neon" or "portable"
    int device = -1;       // cuda; -1: rank modulo the GPUs of its machine
    std::string launch;    // cuda; "graph" or "eager"
    std::string exchange;  // cuda; "auto", "peer", "nccl", "pinned" or "staged"
  } compute;

  // What model.kv_dtype comes to on this backend: "f32" on cpu, "bf16" or "fp8" on cuda.
  std::string kv_format() const;

  struct Memory {
    std::int64_t kv_pages = 0;    // pages; 0: as many as fit kv_bytes
    std::int64_t kv_bytes = 0;    // bytes on each rank; read only when kv_pages is 0
    std::int64_t floor_free = 0;  // bytes left free
  } memory;

  struct Cache {
    bool enabled = true;
    std::int64_t snapshot_bytes = 0;   // on each rank
    std::int64_t snapshot_tokens = 0;  // 0: no grid
  } cache;

  struct State {
    std::string directory;   // resolved path, or empty: nothing on disk
    std::int64_t quota = 0;  // bytes on each rank
    std::int64_t min_tokens = 0;
  } state;

  struct Schedule {
    int max_sequences = 0;                       // lanes
    int max_batch_rows = 0;                      // rows a pass
    int prompt_chunk = 0;                        // rows
    int queue_limit = 0;                         // requests
    std::int64_t queue_tokens = 0;               // tokens; 0: no limit
    Duration round_budget{};                     // 0: from measured pass costs
    Duration request_timeout{};                  // 0: none
    Duration drain_timeout{};                    // of replies under way when rank 0 is told to stop
    Duration background_turn{};                  // 0: background work waits for ever
    std::vector<std::string> background_models;  // names whose requests are background
    std::vector<std::string> background_keys;    // SHA-256, hex: keys whose requests are
  } schedule;

  struct Draft {
    std::string kind;   // "none", "mtp", "copy", "dflash", "dspark" or "auto"
    std::string model;  // folder of a block drafter; "": none
    int max_width = 0;  // rows of a verify window, the first one included
    int min_match = 0;  // tokens

    /// The block drafter's folder, or "" where nothing would use it.
    std::string model_in_use() const { return kind == "dflash" || kind == "auto" ? model : ""; }
    /// The block drafter that the model brings along is used, if there is one.
    bool uses_own() const { return kind == "dspark" || (kind == "auto" && model.empty()); }
  } draft;

  // What a request gets for the fields it leaves out.
  struct Sampling {
    double temperature = 0;
    double top_p = 0;
    int top_k = 0;  // 0: off
    double min_p = 0;
    double repetition_penalty = 0;  // 1: off
    std::int64_t seed_salt = 0;
    std::int64_t max_tokens = 0;
  } sampling;

  struct Http {
    HostPort listen;
    int threads = 0;
    std::int64_t max_header_bytes = 0;
    std::int64_t max_body_bytes = 0;
    Duration header_timeout{};
    Duration body_timeout{};
    Duration idle_timeout{};
    std::int64_t write_buffer_bytes = 0;  // a connection
    int max_connections = 0;
    std::vector<std::string> api_keys;    // SHA-256, hex; use api_key_hashes() for these and the file's
    std::string api_keys_file;            // resolved path, or empty
    std::vector<std::string> admin_keys;  // SHA-256, hex; none: no admin routes
    std::string cors_origin;              // empty: no CORS headers
  } http;

  struct Grpc {
    bool enabled = false;
    HostPort listen;
    std::int64_t max_message_bytes = 0;
  } grpc;

  struct Log {
    std::string level;
    std::string format;  // "text" or "json"
  } log;

  struct Metrics {
    bool enabled = false;
  } metrics;

  // Where it came from, for explain_profile.
  std::string origin;                      // the file as given
  std::vector<ProfilePosition> positions;  // one an option, in the order of profile_options()
  std::vector<std::string> warnings;       // FILE:LINE:COLUMN: KEY: TEXT, one line each
};

// Reads and checks the profile at `path`. NotFound or PermissionDenied when it cannot be read; InvalidArgument when it
// is not a regular file, too large, wrong, or holds cluster.token while any user of the machine may read it.
absl::StatusOr<Profile> load_profile(const std::string& path);

// The same for text. `origin` names it in messages, and relative paths are taken from its folder.
absl::StatusOr<Profile> parse_profile(std::string_view text, const std::string& origin);

// All errors of a text, in file order, unformatted; `profile` is filled (with defaults where a value was refused)
// either way.
std::vector<ProfileError> check_profile(std::string_view text, const std::string& origin, Profile* profile);

// Every option at its default; model.path and model.served_name are empty. For tests and for commands without a
// profile.
Profile default_profile();

// SHA-256 in hex over the effective values of the options that must agree on all ranks (ProfileOption::cluster_wide),
// in table order. A value written out and the same value by default give the same hash. Paths and secrets are not part
// of it.
std::string profile_hash(const Profile& profile);

// Every effective option with its place in the file or "default", what is allowed and what it does. `key` restricts it
// to one option or one section; InvalidArgument with a suggestion when there is no such key. Secrets are not printed.
absl::StatusOr<std::string> explain_profile(const Profile& profile, const std::string& key = "");

// The text of docs/profiles.md.
std::string reference_markdown();

// The secret that ranks show each other: cluster.token, or the contents of cluster.token_file without surrounding white
// space, or "" when neither is set. Errors: the file is missing, over 64 KiB, readable by every user of the machine, or
// holds no token of 16 to 256 printable characters.
absl::StatusOr<std::string> cluster_token(const Profile& profile);

// http.api_keys and those of http.api_keys_file (one hash a line, # starts a comment), in lower-case hex.
absl::StatusOr<std::vector<std::string>> api_key_hashes(const Profile& profile);

// "127.0.0.1:7070", "[::1]:7070".
std::string host_port_text(const Profile::HostPort& address);
// True for localhost, 127.0.0.0/8 and ::1: not reachable from other machines.
bool is_loopback_host(std::string_view host);
// True for 0.0.0.0 and ::, which stand for every address of the machine.
bool is_any_address(std::string_view host);

// "FILE:LINE:COLUMN: KEY: PROBLEM: found …", as in the statuses.
std::string profile_error_text(const ProfileError& error, const std::string& origin);

}  // namespace tensorfold
