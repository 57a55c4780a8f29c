// Checks of a DeviceExchange that every rank of a world runs, in threads or processes: contents that all ranks derive
// from a seed, compared byte for byte. The statuses say which byte of which message was wrong.
#pragma once

#include "absl/status/status.h"
#include "transport/base/communicator.h"
#include "transport/device/device_exchange.h"

namespace tensorfold {

inline constexpr size_t kLargestMessage = size_t{4} << 20;  // that the checks send: to be reserved

// Unequal, odd and empty sizes, aligned and not, in place and not; nothing written around the outputs.
absl::Status check_sizes_of_all(Communicator& communicator, DeviceExchange& exchange);

// One graph of several operations, `launches` times with other contents.
absl::Status check_graph(Communicator& communicator, DeviceExchange& exchange, int launches);

// cuda_peer_sum against the tree on the host, bit for bit, and against fold, all_gather and finish.
absl::Status check_sum(Communicator& communicator, DeviceExchange& exchange);

}  // namespace tensorfold
