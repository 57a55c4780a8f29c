#include "transport/ucx/ucx_worker.h"

#include <fmt/format.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tensorfold {
namespace {

// UCX's own defaults look for dead peers every 20 s, and never on shared memory.
constexpr const char* kKeepaliveInterval = "500ms";

absl::Status ucx_error(ucs_status_t status, std::string_view what) {
  return absl::UnavailableError(fmt::format("UCX: {}: {}", what, ucs_status_string(status)));
}

absl::Status modify(ucp_config_t* config, const std::string& name, const std::string& value) {
  const ucs_status_t status = ucp_config_modify(config, name.c_str(), value.c_str());
  if (status == UCS_OK) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("UCX does not accept the setting {}={}: {}", name, value, ucs_status_string(status)));
}

// Messages of 8 KiB that fit on the way to a rank in shared memory (UCX's default: 64). Where ranks share cores, a
// sender that finds no room has to wait until its receiver has had a turn: 2 MiB of room make that rare.
constexpr const char* kSharedMemoryFifo = "256";

// UCX warns of settings for transports that are not used.
bool uses_shared_memory(const std::string& tls) {
  for (const char* name : {"all", "shm", "sm", "mm", "posix", "sysv", "xpmem"}) {
    if (tls.find(name) != std::string::npos) return true;
  }
  return tls.empty();
}

absl::Status apply(ucp_config_t* config, const UcxOptions& options) {
  absl::Status status;
  if (uses_shared_memory(options.tls)) status = modify(config, "MM_FIFO_SIZE", kSharedMemoryFifo);
  if (status.ok() && options.detect_peer_failure) {
    status = modify(config, "KEEPALIVE_INTERVAL", kKeepaliveInterval);
    if (status.ok() && uses_shared_memory(options.tls)) status = modify(config, "MM_ERROR_HANDLING", "y");
  }
  if (status.ok() && !options.tls.empty()) status = modify(config, "TLS", options.tls);
  if (status.ok() && !options.net_devices.empty()) status = modify(config, "NET_DEVICES", options.net_devices);
  for (const auto& [name, value] : options.settings) {
    if (status.ok()) status = modify(config, name, value);
  }
  return status;
}

// Known to the process, so that a leak checker finds them referred to.
void keep_for_ever(ucp_context_h context, ucp_worker_h worker) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::pair<ucp_context_h, ucp_worker_h>>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept.emplace_back(context, worker);
}

}  // namespace

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::create(const UcxOptions& options) {
  std::unique_ptr<UcxWorker> worker(new UcxWorker);
  absl::Status status = worker->open(options);
  if (!status.ok()) return status;
  return worker;
}

absl::Status UcxWorker::open(const UcxOptions& options) {
  detect_peer_failure_ = options.detect_peer_failure;
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return ucx_error(status, "reading its configuration");
  absl::Status applied = apply(config, options);
  if (!applied.ok()) {
    ucp_config_release(config);
    return applied;
  }
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  params.estimated_num_eps = kMaxWorld;
  params.name = "tensorfold";
  status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return ucx_error(
        status, fmt::format("no transport for tls='{}', net_devices='{}'", options.tls.empty() ? "all" : options.tls,
                            options.net_devices.empty() ? "all" : options.net_devices));
  }
  ucp_worker_params_t worker_params = {};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS;
  // One thread at a time, not always the same one.
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  worker_params.events = UCP_WAKEUP_TAG_RECV | UCP_WAKEUP_TAG_SEND | UCP_WAKEUP_TX | UCP_WAKEUP_RX;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) return ucx_error(status, "opening its transports");
  status = ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) return ucx_error(status, "no wake-up for the transports chosen");
  return absl::OkStatus();
}

UcxWorker::~UcxWorker() {
  if (abandoned_) {
    keep_for_ever(context_, worker_);
    return;
  }
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
}

absl::StatusOr<std::vector<std::byte>> UcxWorker::address() const {
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  const ucs_status_t status = ucp_worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) return ucx_error(status, "its own address");
  const auto* first = reinterpret_cast<const std::byte*>(address);
  std::vector<std::byte> copy(first, first + bytes);
  ucp_worker_release_address(worker_, address);
  return copy;
}

}  // namespace tensorfold
