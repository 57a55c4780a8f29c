#include "worker/runtime/world_sum.h"

#include "worker/runtime/exchange_sum.h"
#if TENSORFOLD_WITH_CUDA
#include "worker/runtime/device_sum.h"
#endif

namespace tensorfold {

std::unique_ptr<WorldSum> make_world_sum(Ops& ops) {
#if TENSORFOLD_WITH_CUDA
  if (std::unique_ptr<WorldSum> sum = make_device_sum(ops); sum != nullptr) return sum;
#endif
  return std::make_unique<ExchangeSum>(ops);
}

}  // namespace tensorfold
