#include "kernels/cuda/device.h"

namespace tensorfold {
namespace {

thread_local std::string first_failure;

}  // namespace

bool cuda_ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  if (first_failure.empty()) {
    first_failure = std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")";
  }
  return false;
}

std::string cuda_failure() {
  std::string failure;
  failure.swap(first_failure);
  return failure;
}

}  // namespace tensorfold
