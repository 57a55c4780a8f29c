// Options of the model, the ranks and the machines they run on.
#include "coordinator/profile/options_internal.h"
#include "coordinator/profile/values.h"

namespace tensorfold::profile_table {
namespace {

const ProfilePattern kModelName = {"a name of letters, digits and . _ - / : +, at most 200", [](std::string_view text) {
                                     return text.size() <= 200 && consists_of(text, "._-/:+");
                                   }};
const ProfilePattern kHostLabel = {"a host name or address: letters, digits and . _ - :", [](std::string_view text) {
                                     return text.size() <= 253 && consists_of(text, "._-:");
                                   }};
const ProfilePattern kDeviceName = {
    "network devices as UCX names them (mlx5_0:1, eth0, lo)",
    [](std::string_view text) { return text.size() <= 256 && consists_of(text, "._-:@,"); }};
const ProfilePattern kUcxTransport = {"a UCX transport name (self, sm, tcp, rc, ud, dc)", [](std::string_view text) {
                                        return text.size() <= 32 && consists_of(text, "_");
                                      }};
const ProfilePattern kToken = {"16 to 256 printable characters without spaces", is_cluster_token};

Options model_options() {
  using M = Profile::Model;
  return {
      {.key = "model.path",
       .type = Type::kPath,
       .field = at<&Profile::model, &M::path>,
       .help = "Folder of the checkpoint: config.json, tokenizer.json and safetensors files. Every rank reads its own "
               "copy; ranks "
               "refuse to join when the copies differ.",
       .example = "../models/sprout",
       .required = true},
      {.key = "model.served_name",
       .type = Type::kString,
       .field = at<&Profile::model, &M::served_name>,
       .pattern = &kModelName,
       .help = "The model name that requests use and replies carry.",
       .example = "sprout",
       .default_note = "the name of the folder in model.path"},
      {.key = "model.aliases",
       .type = Type::kList,
       .field = at<&Profile::model, &M::aliases>,
       .pattern = &kModelName,
       .help = "More names that requests may use for the same model.",
       .example = "[default, sprout-latest]",
       .unique = true},
      {.key = "model.context_length",
       .type = Type::kInteger,
       .field = at<&Profile::model, &M::context_length>,
       .fallback = "0",
       .min = 0,
       .max = 16'777'216,
       .unit = "tokens",
       .help =
           "The longest prompt and reply together. A longer request is refused before any work. It may not exceed the "
           "checkpoint's own length.",
       .example = "8192",
       .default_note = "0: the checkpoint's own length",
       .cluster_wide = true},
      {.key = "model.precision",
       .type = Type::kString,
       .field = at<&Profile::model, &M::precision>,
       .fallback = "checkpoint",
       .choices = {"checkpoint", "full"},
       .help =
           "What activations are in families that round some of them as part of their definition (deepseek_v41): "
           "`checkpoint` rounds as the model was trained, `full` leaves them as they are. In all other families both "
           "are the same; weights are what the checkpoint stores in both (docs/formats/weights.md). Part of the "
           "numeric fingerprint.",
       .example = "checkpoint",
       .cluster_wide = true},
      {.key = "model.kv_dtype",
       .type = Type::kString,
       .field = at<&Profile::model, &M::kv_dtype>,
       .fallback = "auto",
       .choices = {"auto", "f32", "bf16", "fp8"},
       .help = "Number format of the KV cache. `auto`: f32 on the cpu backend, which has no other, and bf16 on cuda, "
               "which also has fp8 (e4m3, one power-of-two scale a key or value vector). Part of the numeric "
               "fingerprint.",
       .example = "fp8",
       .cluster_wide = true},
  };
}

Options cluster_options() {
  using C = Profile::Cluster;
  return {
      {.key = "cluster.world",
       .type = Type::kInteger,
       .field = at<&Profile::cluster, &C::world>,
       .fallback = "1",
       .min = 1,
       .max = 8,
       .unit = "ranks",
       .help = "Number of ranks that share the weights. The model bounds it too: a world may not exceed the model's "
               "smallest "
               "slice count.",
       .example = "2",
       .cluster_wide = true},
      {.key = "cluster.transport",
       .type = Type::kString,
       .field = at<&Profile::cluster, &C::transport>,
       .fallback = "local",
       .choices = {"local", "ucx"},
       .help = "How ranks exchange activations. `ucx`: between processes, over shared memory, TCP or RDMA. `local`: "
               "inside one "
               "process, which for a served cluster means one rank.",
       .example = "ucx",
       .cluster_wide = true},
      {.key = "cluster.hosts",
       .type = Type::kPerRank,
       .field = at<&Profile::cluster, &C::hosts>,
       .pattern = &kHostLabel,
       .help = "A label for each rank's host, used in messages, so that a lost rank is named as you know it.",
       .example = "[spark-1, spark-2]",
       .cluster_wide = true},
      {.key = "cluster.coordinator",
       .type = Type::kAddress,
       .field = at<&Profile::cluster, &C::coordinator>,
       .fallback = "127.0.0.1:7070",
       .min = 1,
       .max = 65535,
       .help = "Where the ranks reach rank 0's control plane. Beyond loopback a token is needed.",
       .example = "192.168.100.1:7070",
       .cluster_wide = true},
      {.key = "cluster.bind",
       .type = Type::kString,
       .field = at<&Profile::cluster, &C::bind>,
       .pattern = &kHostLabel,
       .help = "Address that rank 0 listens on for the control plane, when it is not the host of cluster.coordinator "
               "(behind "
               "address translation, say).",
       .example = "192.168.100.1",
       .default_note = "the host of cluster.coordinator"},
      {.key = "cluster.allow_any_address",
       .type = Type::kBool,
       .field = at<&Profile::cluster, &C::allow_any_address>,
       .fallback = "false",
       .help = "Allows the control plane to listen on every address of the machine (0.0.0.0 or ::). Off, such an "
               "address is an "
               "error.",
       .example = "true"},
      {.key = "cluster.token",
       .type = Type::kString,
       .field = at<&Profile::cluster, &C::token>,
       .pattern = &kToken,
       .help = "Secret that ranks show one another. A profile that holds one is refused while every user of the "
               "machine may read "
               "the file; cluster.token_file keeps the profile free of secrets.",
       .example = "0123456789abcdef0123456789abcdef",
       .secret = true},
      {.key = "cluster.token_file",
       .type = Type::kPath,
       .field = at<&Profile::cluster, &C::token_file>,
       .help = "File that holds the token, the same on every host; white space around it is ignored. It is refused "
               "while every "
               "user of the machine may read it.",
       .example = "/etc/tensorfold/token"},
      {.key = "cluster.join_timeout",
       .type = Type::kDuration,
       .field = at<&Profile::cluster, &C::join_timeout>,
       .fallback = "10m",
       .min = kSecond,
       .max = 24 * kHour,
       .unit = "time",
       .help = "How long a starting rank waits for the others, loading included. It says whom it waits for.",
       .example = "5m",
       .cluster_wide = true},
      {.key = "cluster.step_timeout",
       .type = Type::kDuration,
       .field = at<&Profile::cluster, &C::step_timeout>,
       .fallback = "10s",
       .min = 100 * kMillisecond,
       .max = kHour,
       .unit = "time",
       .help = "How long one pass may take before the ranks it waits for count as stalled, not counting the time for "
               "its rows.",
       .example = "20s",
       .cluster_wide = true},
      {.key = "cluster.step_timeout_per_row",
       .type = Type::kDuration,
       .field = at<&Profile::cluster, &C::step_timeout_per_row>,
       .fallback = "100ms",
       .min = 0,
       .max = kMinute,
       .unit = "time a row",
       .help = "Added to cluster.step_timeout for every row of the pass, so that long prompt passes have a longer "
               "deadline.",
       .example = "50ms",
       .cluster_wide = true},
      {.key = "cluster.heartbeat_interval",
       .type = Type::kDuration,
       .field = at<&Profile::cluster, &C::heartbeat_interval>,
       .fallback = "200ms",
       .min = 10 * kMillisecond,
       .max = kMinute,
       .unit = "time",
       .help = "How often each rank says that it is alive.",
       .example = "500ms",
       .cluster_wide = true},
      {.key = "cluster.heartbeat_timeout",
       .type = Type::kDuration,
       .field = at<&Profile::cluster, &C::heartbeat_timeout>,
       .fallback = "1s",
       .min = 50 * kMillisecond,
       .max = 10 * kMinute,
       .unit = "time",
       .help = "A rank not heard of for so long is lost. At least twice the interval.",
       .example = "3s",
       .cluster_wide = true},
      {.key = "cluster.park_deadline",
       .type = Type::kDuration,
       .field = at<&Profile::cluster, &C::park_deadline>,
       .fallback = "60s",
       .min = 0,
       .max = 24 * kHour,
       .unit = "time",
       .help = "How long requests in flight wait for a lost rank to come back before they end with 503. 0s: they end "
               "at once.",
       .example = "5m"},
  };
}

Options ucx_options() {
  using U = Profile::Cluster::Ucx;
  return {
      {.key = "cluster.ucx.tls",
       .type = Type::kList,
       .field = at<&Profile::cluster, &Profile::Cluster::ucx, &U::tls>,
       .pattern = &kUcxTransport,
       .help = "UCX transports that may be used (what UCX_TLS would say).",
       .example = "[self, sm, tcp]",
       .default_note = "UCX chooses",
       .cluster_wide = true,
       .unique = true},
      {.key = "cluster.ucx.net_devices",
       .type = Type::kPerRank,
       .field = at<&Profile::cluster, &Profile::Cluster::ucx, &U::net_devices>,
       .pattern = &kDeviceName,
       .help = "Network devices of each rank, in rank order; one entry stands for all ranks. Several devices of a rank "
               "are one entry in quotes: \"mlx5_0:1,mlx5_1:1\".",
       .example = "[mlx5_0:1, mlx5_2:1]",
       .default_note = "all devices",
       .cluster_wide = true},
      {.key = "cluster.ucx.expect_transport",
       .type = Type::kString,
       .field = at<&Profile::cluster, &Profile::Cluster::ucx, &U::expect_transport>,
       .fallback = "any",
       .choices = {"any", "shm", "tcp", "rdma"},
       .help = "The kind of path that should be found between ranks. At start the path found is compared with it, so "
               "that a "
               "silent fall-back from RDMA to sockets is noticed.",
       .example = "rdma",
       .cluster_wide = true},
      {.key = "cluster.ucx.min_bandwidth",
       .type = Type::kRate,
       .field = at<&Profile::cluster, &Profile::Cluster::ucx, &U::min_bandwidth>,
       .fallback = "0B/s",
       .min = 0,
       .max = kTiB,
       .unit = "bytes a second",
       .help = "The least bandwidth that the measurement at start should find between two ranks. 0B/s: not compared.",
       .example = "10GiB/s",
       .cluster_wide = true},
      {.key = "cluster.ucx.on_slow",
       .type = Type::kString,
       .field = at<&Profile::cluster, &Profile::Cluster::ucx, &U::on_slow>,
       .fallback = "warn",
       .choices = {"warn", "refuse"},
       .help = "What happens when the path found is not the expected kind or below the bandwidth: a warning with both "
               "values, or "
               "the cluster does not start.",
       .example = "refuse",
       .cluster_wide = true},
  };
}

Options compute_options() {
  using C = Profile::Compute;
  return {
      {.key = "compute.backend",
       .type = Type::kString,
       .field = at<&Profile::compute, &C::backend>,
       .fallback = "cpu",
       .choices = {"cpu", "cuda"},
       .help = "Where passes run: the processor's cores or an NVIDIA GPU a rank. Part of the numeric fingerprint.",
       .example = "cuda",
       .cluster_wide = true},
      {.key = "compute.device",
       .type = Type::kInteger,
       .field = at<&Profile::compute, &C::device>,
       .fallback = "-1",
       .min = -1,
       .max = 63,
       .unit = "GPU number",
       .help = "cuda: number of the GPU on the rank's machine, counted from 0.",
       .example = "0",
       .default_note = "-1: the rank's number modulo the GPUs of its machine"},
      {.key = "compute.launch",
       .type = Type::kString,
       .field = at<&Profile::compute, &C::launch>,
       .fallback = "graph",
       .choices = {"graph", "eager"},
       .help = "cuda: `graph` captures passes of up to 64 rows once and replays them, `eager` launches every kernel. "
               "The same bits; `eager` is slower and for finding faults.",
       .example = "eager"},
      {.key = "compute.exchange",
       .type = Type::kString,
       .field = at<&Profile::compute, &C::exchange>,
       .fallback = "auto",
       .choices = {"auto", "peer", "nccl", "pinned", "staged"},
       .help =
           "cuda: how sums over slices travel between ranks. `peer`: GPUs of one machine write into each other's "
           "memory; `nccl`: NCCL sends and receives; `pinned`: through host memory and UCX, which every machine can; "
           "`staged`: the same with the host waiting in between, for several ranks of one process on one GPU. `auto` "
           "measures what all ranks can do and takes the fastest. The same bits.",
       .example = "nccl",
       .cluster_wide = true},
      {.key = "compute.threads",
       .type = Type::kInteger,
       .field = at<&Profile::compute, &C::threads>,
       .fallback = "0",
       .min = 0,
       .max = 1024,
       .unit = "threads",
       .help = "Threads of each rank's passes. When several ranks share a machine, give each its part of the cores. "
               "Replies do "
               "not depend on it.",
       .example = "8",
       .default_note = "0: all cores"},
      {.key = "compute.isa",
       .type = Type::kString,
       .field = at<&Profile::compute, &C::isa>,
       .fallback = "auto",
       .choices = {"auto", "avx512", "avx2", "neon", "portable"},
       .help = "Instruction set of the kernels. `auto`: the fastest that the processor has. All give the same bits; "
               "one that the "
               "processor lacks is an error at start.",
       .example = "avx2"},
  };
}

Options memory_options() {
  using M = Profile::Memory;
  return {
      {.key = "memory.kv_pages",
       .type = Type::kInteger,
       .field = at<&Profile::memory, &M::kv_pages>,
       .fallback = "0",
       .min = 0,
       .max = 1 << 20,
       .unit = "pages",
       .help = "Size of the KV cache in pages. Give this or memory.kv_bytes.",
       .example = "4096",
       .default_note = "0: as many as fit memory.kv_bytes",
       .cluster_wide = true},
      {.key = "memory.kv_bytes",
       .type = Type::kSize,
       .field = at<&Profile::memory, &M::kv_bytes>,
       .fallback = "1GiB",
       .min = kMiB,
       .max = 16 * kTiB,
       .unit = "bytes",
       .help = "Size of the KV cache on each rank.",
       .example = "8GiB",
       .cluster_wide = true},
      {.key = "memory.floor_free",
       .type = Type::kSize,
       .field = at<&Profile::memory, &M::floor_free>,
       .fallback = "256MiB",
       .min = 0,
       .max = 16 * kTiB,
       .unit = "bytes",
       .help = "Memory of the machine that stays free. A start that would take it is refused with the numbers.",
       .example = "4GiB"},
  };
}

}  // namespace

Options cluster_side_options() {
  return joined({model_options(), cluster_options(), ucx_options(), compute_options(), memory_options()});
}

}  // namespace tensorfold::profile_table
